"""One kind of state of one unit, on its tier: a flat typed array with a small protocol.

`direct` is the array itself if it can be addressed (device and host memory). `fetch` and `evict` move a
stretch of it to and from a buffer: memory is copied on the current stream, disk is read and written by the
disk engine. Both return a transfer in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from unbounded.native.disk import DiskHandle, ExtentStore
from unbounded.native.host_memory import PAGE_BYTES as PAGE
from unbounded.observe import trace
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.lane import finished
from unbounded.tiers.pool import BufferPool, Lease


class Waitable(Protocol):
    """Work in flight that the host can wait for."""

    def wait(self) -> object:
        """Blocks the host until it may touch what the work reads and writes; raises what went wrong."""


class InFlight(Waitable, Protocol):
    """A transfer between an array and a buffer."""

    def order_stream(self) -> object:
        """Makes the current stream wait for the transfer, or the host if no stream carries it out; raises its error."""


class Array(Protocol):
    """A flat array of `numel` elements of `dtype` on `tier`."""

    tier: str
    dtype: torch.dtype
    numel: int

    @property
    def direct(self) -> torch.Tensor | None: ...

    @property
    def held_bytes(self) -> int:
        """What it takes of its tier."""

    def fetch(self, target: torch.Tensor, start: int = 0) -> InFlight: ...

    def evict(self, source: torch.Tensor, start: int = 0) -> InFlight: ...

    def free(self) -> None: ...


def array_bytes(array: Array) -> int:
    """What its elements take in their dtype, as buffers and files have them."""
    return array.numel * array.dtype.itemsize


class MemoryArray:
    """An array in device or host memory."""

    def __init__(self, tensor: torch.Tensor, tier: str, on_free: Callable[[torch.Tensor], None] | None = None) -> None:
        self.tensor, self.tier = tensor, tier
        self.dtype, self.numel = tensor.dtype, tensor.numel()
        self._on_free = on_free

    @property
    def direct(self) -> torch.Tensor | None:
        return self.tensor

    @property
    def held_bytes(self) -> int:
        return array_bytes(self)

    def fetch(self, target: torch.Tensor, start: int = 0) -> InFlight:
        return _copy(self.tensor[start : start + target.numel()], target)

    def evict(self, source: torch.Tensor, start: int = 0) -> InFlight:
        return _copy(source, self.tensor[start : start + source.numel()])

    def free(self) -> None:
        tensor, self.tensor = self.tensor, self.tensor.new_empty(0)
        if self._on_free is not None:
            self._on_free(tensor)


class DiskArray:
    """An array in one extent of the disk store. A buffer that the disk cannot reach goes through the pool."""

    def __init__(self, store: ExtentStore, bounce: BufferPool, dtype: torch.dtype, numel: int) -> None:
        self.tier, self.dtype, self.numel = "disk", dtype, numel
        self._store, self._bounce = store, bounce
        self._extent = store.allocate(numel * dtype.itemsize)
        self.is_zero = self._extent.is_new  # until it is written

    @property
    def direct(self) -> torch.Tensor | None:
        return None

    @property
    def held_bytes(self) -> int:
        return array_bytes(self)

    def fetch(self, target: torch.Tensor, start: int = 0) -> InFlight:
        if is_reachable(target):
            return _Traced(
                "disk read", self._store.read(self._extent, as_bytes(target), start * self.dtype.itemsize), target
            )
        _BouncedRead(self, self._bounce, target, start).run()
        return finished()

    def evict(self, source: torch.Tensor, start: int = 0) -> InFlight:
        if is_reachable(source):
            return _Traced(
                "disk write", self._store.write(self._extent, as_bytes(source), start * self.dtype.itemsize), source
            )
        _BouncedWrite(self, self._bounce, source, start).run()
        return finished()

    def free(self) -> None:
        self._store.free(self._extent)


@dataclass(eq=False)
class _Stretch:
    """A part of a buffer that the disk cannot reach, from `begin` to `stop`, and what carries it."""

    begin: int
    stop: int
    lease: Lease | None = None
    carrier: torch.Tensor | None = None
    transfer: InFlight | None = None


class _Bounced:
    """A transfer between a disk array and a buffer that the disk cannot reach: stretch by stretch through the pool's
    buffers, several of them in flight. `start` is the buffer's place in the array."""

    def __init__(self, array: DiskArray, bounce: BufferPool, buffer: torch.Tensor, start: int) -> None:
        self._array, self._bounce, self._buffer, self._start = array, bounce, buffer, start
        self._pipeline: ItemPipeline[_Stretch]

    def run(self) -> None:
        numel, step = self._buffer.numel(), self._bounce.buffer_bytes // PAGE * PAGE // self._array.dtype.itemsize
        depth = max(1, self._bounce.count - 1)  # others share the pool
        self._pipeline = ItemPipeline(self, num_ahead=depth, num_unfinished=depth, pool=self._bounce)
        try:
            self._pipeline.run(_Stretch(begin, min(begin + step, numel)) for begin in range(0, numel, step))
        finally:
            del self._pipeline  # which holds this object, and with it the buffer

    def read(self, item: _Stretch) -> None:
        item.lease = self._pipeline.lease()
        item.carrier = item.lease.tensor(self._array.dtype, item.stop - item.begin)

    def work(self, item: _Stretch) -> None:
        raise NotImplementedError

    def finish(self, item: _Stretch) -> None:
        raise NotImplementedError

    def abandon(self, item: _Stretch) -> None:
        try:
            if item.transfer is not None:
                item.transfer.wait()
        finally:
            self._give_back(item)

    def _give_back(self, item: _Stretch) -> None:
        if item.lease is not None:
            item.lease.release(stream_mark(self._buffer))

    def _part(self, item: _Stretch) -> torch.Tensor:
        return self._buffer[item.begin : item.stop]


class _BouncedRead(_Bounced):
    """From the disk. The device may still copy when it is over."""

    def read(self, item: _Stretch) -> None:
        super().read(item)
        assert item.carrier is not None
        item.transfer = self._array.fetch(item.carrier, self._start + item.begin)

    def work(self, item: _Stretch) -> None:
        assert item.carrier is not None
        assert item.transfer is not None
        item.transfer.wait()
        self._part(item).copy_(item.carrier, non_blocking=True)
        self._give_back(item)

    def finish(self, item: _Stretch) -> None:
        pass


class _BouncedWrite(_Bounced):
    """To the disk."""

    def work(self, item: _Stretch) -> None:
        assert item.carrier is not None
        item.carrier.copy_(self._part(item))
        item.transfer = self._array.evict(item.carrier, self._start + item.begin)

    def finish(self, item: _Stretch) -> None:
        assert item.transfer is not None
        item.transfer.wait()
        self._give_back(item)


class _Traced:
    """A disk transfer whose time, from submission to the end of the wait for it, goes to its lane."""

    def __init__(self, lane: str, handle: DiskHandle, buffer: torch.Tensor) -> None:
        self._lane, self._handle = lane, handle
        self._num_bytes = buffer.numel() * buffer.element_size()
        self._start = time.perf_counter_ns()

    def wait(self) -> None:
        self._handle.wait()
        if self._num_bytes:
            trace.record(self._lane, "piece", self._start, time.perf_counter_ns(), bytes=self._num_bytes)
            self._num_bytes = 0

    def order_stream(self) -> None:
        self.wait()


class DeviceCopy:
    """A copy in flight to or from a GPU."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def order_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _copy(source: torch.Tensor, target: torch.Tensor) -> InFlight:
    if source.device == target.device:
        target.copy_(source)
        return finished()
    lane = "host-to-device" if target.device.type == "cuda" else "device-to-host"
    with trace.device_span(lane, "copy", bytes=source.numel() * source.element_size()):
        target.copy_(source, non_blocking=True)
    event = stream_mark(target if target.device.type == "cuda" else source)
    assert event is not None
    return DeviceCopy(event)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def is_reachable(tensor: torch.Tensor) -> bool:
    """Whether the disk can move this buffer without a bounce: host memory on a page boundary."""
    return tensor.device.type == "cpu" and tensor.data_ptr() % PAGE == 0


def stream_mark(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event for when the current stream has come this far; None for a tensor that no stream works on."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
