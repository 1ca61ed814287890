"""Frozen bf16 weights on host or disk in three quarters of their bytes, without losing a bit.

A record stands for 4,096 weights (native/kernels/packed.h). A GPU packs and unpacks its own weights, so fewer bytes
cross the link. Weights that do not pack, because their exponents differ too much, are kept as they are beside the
records, in host memory that is asked for when they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from unbounded.native import kernels
from unbounded.native.bulk import new_tensor
from unbounded.planner.models.packed_size import GROUP_NUMEL, RECORD_BYTES, RECORD_NUMEL, STRETCH_NUMEL, packed_bytes
from unbounded.tiers.array import Array, DeviceCopy, InFlight, stream_mark
from unbounded.tiers.lane import finished

HOST_STRETCH_NUMEL = 4 * GROUP_NUMEL  # weights that the host packs or unpacks at once
_HOST = torch.device("cpu")
_TOO_MANY = 255  # in a record's second byte: it stands for nothing


class PackedArray:
    """An array of bf16 in the records of `inner`, an array of bytes. `allocate` gives host memory for what does not
    pack, so many elements of bf16."""

    dtype = torch.bfloat16

    def __init__(self, inner: Array, numel: int, allocate: Callable[[int], Array]) -> None:
        self.tier, self.numel = inner.tier, numel
        self._inner, self._allocate = inner, allocate
        # By record. One that did not pack once has its memory for good, and uses it while it does not pack.
        self._memory: dict[int, torch.Tensor] = {}
        self._loose: set[int] = set()
        self._arrays: list[Array] = []
        # A record may have weights of two stretches: one must not be read while the other is written.
        self._lock = threading.Lock()
        self._reads: list[torch.cuda.Event] = []  # of a GPU, perhaps still in flight

    @property
    def direct(self) -> torch.Tensor | None:
        return None

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def fetch(self, target: torch.Tensor, start: int = 0) -> InFlight:
        with self._lock:
            self._unpack(target, start)
            mark = stream_mark(target)
            if mark is None:
                return finished()
            self._reads = [*(read for read in self._reads if not read.query()), mark]
            return DeviceCopy(mark)

    def evict(self, source: torch.Tensor, start: int = 0) -> InFlight:
        with self._lock:
            while self._reads:
                self._reads.pop().synchronize()
            self._write(source, start)
        return finished()

    def free(self) -> None:
        self._memory.clear()
        for array in (self._inner, *self._arrays):
            array.free()

    def _unpack(self, target: torch.Tensor, start: int) -> None:
        packing = _packing_on(target.device)
        for first, last in _stretches(start, start + target.numel(), target.device):
            low = max(first, start)
            part, skip = target[low - start : last - start], low - first
            begin = skip // RECORD_NUMEL * RECORD_BYTES
            skip %= RECORD_NUMEL
            records = self._records(first, last, target.device)
            packing.unpack(records[begin : begin + packed_bytes(skip + part.numel())], part, skip)
        self._fill_loose(target, start)

    def _write(self, source: torch.Tensor, start: int) -> None:
        stop = start + source.numel()
        for first, last in _stretches(start, stop, source.device):
            low, end = max(first, start), min(_round_up(last), self.numel)
            part = source[low - start : last - start]
            if (first, end) != (low, last):  # the rest of the first and last groups stays as it is
                whole = new_tensor(end - first, self.dtype, source.device)
                self._unpack(whole, first)
                whole[low - first : last - first].copy_(part)
                part = whole
            self._pack(part.contiguous(), first)

    def _pack(self, weights: torch.Tensor, first: int) -> None:
        """Stores weights that begin with a group, and end with one or with the array."""
        records = new_tensor(packed_bytes(weights.numel()), torch.uint8, weights.device)
        _packing_on(weights.device).pack(weights, records)
        flags = records.view(-1, RECORD_BYTES)[:, 1]
        failed = [first // RECORD_NUMEL + index for index in torch.nonzero(flags == _TOO_MANY).view(-1).tolist()]
        self._take_memory([record for record in failed if record not in self._memory])
        self._inner.evict(records, _offset(first)).wait()
        self._loose.difference_update(range(first // RECORD_NUMEL, -(-(first + weights.numel()) // RECORD_NUMEL)))
        for record in failed:
            part = weights[record * RECORD_NUMEL - first :][:RECORD_NUMEL]
            self._memory[record][: part.numel()].copy_(part)
            self._loose.add(record)

    def _take_memory(self, records: list[int]) -> None:
        if records:
            self._arrays.append(self._allocate(len(records) * RECORD_NUMEL))
            memory = self._arrays[-1].direct
            assert memory is not None
            self._memory.update(zip(records, memory.view(-1, RECORD_NUMEL), strict=True))

    def _fill_loose(self, target: torch.Tensor, start: int) -> None:
        """Puts the weights that do not pack into their places in a target that begins at `start`."""
        stop = start + target.numel()
        for record in self._loose:
            first = record * RECORD_NUMEL
            low, high = max(first, start), min(first + RECORD_NUMEL, stop)
            if low < high:
                target[low - start : high - start].copy_(self._memory[record][low - first : high - first])

    def _records(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """The records of the groups with weights `first` to `last`, where they are to be unpacked."""
        offset, end = _offset(first), min(_offset(_round_up(last)), self._inner.numel)
        held = self._inner.direct
        if held is not None and held.device == device:
            return held[offset:end]
        records = new_tensor(end - offset, torch.uint8, device)
        self._inner.fetch(records, offset).order_stream()
        return records


def _packing_on(device: torch.device) -> ModuleType:
    """Where `pack` and `unpack` are for tensors on a device."""
    if device == _HOST:
        return kernels
    from unbounded.tiers.packed import device_packing  # with Triton, which comes with torch for GPUs

    return device_packing


def _stretches(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Pieces that cover [start, stop), each from the beginning of a group."""
    step = HOST_STRETCH_NUMEL if device == _HOST else STRETCH_NUMEL
    for first in range(start // GROUP_NUMEL * GROUP_NUMEL, stop, step):
        yield first, min(first + step, stop)


def _round_up(numel: int) -> int:
    return -(-numel // GROUP_NUMEL) * GROUP_NUMEL


def _offset(first: int) -> int:
    """Where the record that begins with the weight `first` is."""
    return first // RECORD_NUMEL * RECORD_BYTES
