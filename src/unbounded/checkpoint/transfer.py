"""From verified bytes of a checkpoint to arrays on their tiers, in one pass over the files.

    read      | c2 | c3 |              whole blocks, several chunks ahead, each verified by the thread that read it
    put            | c1 | c0 |         into memory, onto the device, into the disk tier

Copies go in the order of the files, so every block is read once. A chunk that fills part of one array in host
memory is read straight into it. With `staged` nothing is put before `install`, so that a checkpoint that turns out
to be damaged has changed nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from unbounded.checkpoint.reading import CHUNK_BYTES, Files, Read
from unbounded.checkpoint.slices import Extent, plan_extents
from unbounded.checkpoint.snapshot import WEIGHT
from unbounded.checkpoint.targets import Conversion, Copy, Source, array_of, cut_copies, direct_target
from unbounded.native.memory import host_buffer
from unbounded.observe import trace
from unbounded.optim import formats
from unbounded.optim.rules import UpdateRule
from unbounded.tiers.array import Array, Waitable
from unbounded.tiers.pool import BufferPool, Lease
from unbounded.zero.layout import Slot, clip_range

# Chunks read ahead, and put in place behind: enough that the disk stays busy while this thread waits for a core.
DEPTH = 8


@dataclass(eq=False)
class _Chunk:
    """A stretch of one file on its way: what was asked for, where it lands, what it waits for."""

    file: int
    start: int
    copies: list[Copy]
    extents: list[Extent]
    buffer: torch.Tensor
    lease: Lease | None
    reads: list[Read] = field(default_factory=list)
    puts: list[Waitable] = field(default_factory=list)


class Transfer:
    """Carries out copies and conversions for one rank."""

    def __init__(
        self, files: Files, source: Source, rules: Mapping[torch.dtype, UpdateRule], pool: BufferPool, *, staged: bool
    ) -> None:
        """`pool` must be free; all of it is given back, also after a failure."""
        self.files, self.source, self.rules, self.pool, self.staged = files, source, rules, pool, staged
        self._ahead: deque[_Chunk] = deque()
        self._behind: deque[_Chunk] = deque()
        self._num_leased = 0
        self._waiting: list[Callable[[], Waitable | None]] = []

    def install(self) -> None:
        """Puts everything that was staged where it belongs."""
        for put in self._waiting:
            wait = put()
            if wait is not None:
                wait.wait()
        self._waiting.clear()

    def later(self, action: Callable[[], None]) -> None:
        """Runs `action` now, or with `install` where things are staged."""
        if self.staged:
            self._waiting.append(action)
        else:
            action()

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy(self, copies: Sequence[Copy]) -> None:
        chunk_bytes = min(CHUNK_BYTES, self.pool.buffer_bytes)
        started: list[_Chunk] = []
        try:
            parts = cut_copies(copies, self.files.manifest.files, chunk_bytes, direct=not self.staged)
            for file, start, inside in parts:
                started.append(self._begin(file, start, inside))
                if len(self._ahead) > DEPTH:
                    self._take()
            while self._ahead:
                self._take()
            while self._behind:
                self._finish()
        finally:
            self._abandon(started)

    def _begin(self, file: int, start: int, copies: list[Copy]) -> _Chunk:
        """Starts reading a chunk, into the array it belongs to where it fills memory of its own."""
        entry = self.files.manifest.files[file]
        ranges = [(copy.offset, copy.offset + copy.nbytes) for copy in copies]
        extents = plan_extents(ranges, entry.edges, entry.block_bytes)
        buffer, lease = (None if self.staged else _whole_target(copies, extents)), None
        if buffer is None:
            lease = self._lease()
            buffer = lease.tensor(torch.uint8, self.pool.buffer_bytes)
        chunk = _Chunk(file, start, copies, extents, buffer, lease)
        self._ahead.append(chunk)
        for extent in extents:
            base = extent.start - start if lease is not None else 0
            chunk.reads.append(self.files.read(file, extent.start, buffer[base : base + extent.stop - extent.start]))
        return chunk

    def _take(self) -> None:
        """Waits for the chunk that was begun first and puts it where it belongs."""
        chunk = self._ahead.popleft()
        for extent, read in zip(chunk.extents, chunk.reads, strict=True):
            read.wait()
            begun, ended = read.span_ns()
            trace.record("disk read", "checkpoint", begun, ended, bytes=extent.stop - extent.start)
        for copy in chunk.copies:
            base = copy.offset - chunk.start if chunk.lease is not None else 0
            data = chunk.buffer[base : base + copy.nbytes]
            for first, last in copy.gaps:
                data[first:last].zero_()
            if chunk.lease is not None:
                self._put(copy.array, copy.position, data, chunk.puts)
        self._behind.append(chunk)
        while len(self._behind) > DEPTH:
            self._finish()

    def _put(self, array: Array, position: int, data: torch.Tensor, waits: list[Waitable]) -> None:
        """Bytes to byte `position` of an array; `data` may be reused once `waits` are over."""
        if self.staged:
            kept = data.clone()
            self._waiting.append(lambda: _store(array, position, kept))
            return
        wait = _store(array, position, data)
        if wait is not None:
            waits.append(wait)

    def _finish(self) -> None:
        chunk = self._behind.popleft()
        for put in chunk.puts:
            put.wait()
        self._let_go(chunk)

    def _lease(self) -> Lease:
        """A buffer. All that are out are this transfer's own, so it goes on with them rather than wait."""
        while self._num_leased == self.pool.count:
            if self._behind:
                self._finish()
            else:
                self._take()
        self._num_leased += 1
        return self.pool.lease()

    def _let_go(self, chunk: _Chunk) -> None:
        chunk.reads.clear()
        chunk.puts.clear()
        if chunk.lease is not None:
            chunk.lease.release()
            chunk.lease = None
            self._num_leased -= 1

    def _abandon(self, chunks: Iterable[_Chunk]) -> None:
        """Waits for what a failure left in flight, then gives the buffers back."""
        self._ahead.clear()
        self._behind.clear()
        for chunk in chunks:
            for wait in [*chunk.reads, *chunk.puts]:
                with contextlib.suppress(Exception):  # the first failure is the one that is told
                    wait.wait()
            self._let_go(chunk)

    # -- conversions -----------------------------------------------------------------------------------------------

    def convert(self, conversions: Sequence[Conversion]) -> None:
        """One after another: what a conversion costs is the conversion."""
        for conversion in conversions:
            arrays = self._copy_raw(conversion) if conversion.raw else self._encode(conversion)
            waits: list[Waitable] = []
            for kind, values in arrays.items():
                array = array_of(conversion.unit, kind)
                every = self._every(conversion, kind)
                position = (conversion.start - conversion.unit.owned[0]) // every * array.dtype.itemsize
                self._put(array, position, _as_bytes(values), waits)
            for wait in waits:
                wait.wait()

    def _copy_raw(self, job: Conversion) -> dict[str, torch.Tensor]:
        arrays = {}
        for kind in job.kinds:
            every, dtype = self._every(job, kind), array_of(job.unit, kind).dtype
            flat = host_buffer(-(-(job.stop - job.start) // every) * dtype.itemsize).view(dtype)
            for slot, start, stop in _slots(job):
                part = self._fetch(kind, slot, start, stop)
                assert part is not None
                flat[(start - job.start) // every :][: part.numel()].copy_(part)
            arrays[kind] = flat
        return arrays

    def _encode(self, job: Conversion) -> dict[str, torch.Tensor]:
        """The values in fp32, decoded slot by slot, and encoded whole as the unit keeps them."""
        rule = self.rules.get(job.unit.dtype) if job.unit.trainable else None
        flat = torch.zeros(job.stop - job.start)
        for slot, start, stop in _slots(job):
            values = self._decode(job.kinds[0], slot, start, stop)
            flat[start - job.start : stop - job.start].copy_(values)
        if job.kinds[0] == WEIGHT:
            encoded: Mapping[str, torch.Tensor] = formats.encode_weight(flat, job.unit.dtype, rule)
        else:
            assert rule is not None
            encoded = formats.encode_moment(flat, job.kinds[0], rule)
        return {kind: encoded[kind] for kind in job.kinds}

    def _decode(self, kind: str, slot: Slot, start: int, stop: int) -> torch.Tensor:
        if kind == WEIGHT:
            master = self._fetch("master", slot, start, stop)
            if master is not None:
                return master
            weight, low = self._fetch(WEIGHT, slot, start, stop), self._fetch("low", slot, start, stop)
            assert weight is not None
            if low is None:
                return weight
            stored: Any = SimpleNamespace(format="exact" if low.dtype == torch.int16 else "compact")
            return formats.decode_weight({"weight": weight, "low": low}, stored)
        codes, scale = self._fetch(kind, slot, start, stop), self._fetch(f"{kind}_scale", slot, start, stop)
        assert codes is not None
        return formats.decode_moment(
            {kind: codes, f"{kind}_scale": scale} if scale is not None else {kind: codes}, kind
        )

    def _fetch(self, kind: str, slot: Slot, start: int, stop: int) -> torch.Tensor | None:
        """The stored elements behind [start, stop) of the flat buffer, or None where there is no such state."""
        entry = self.source.entry(kind, slot.name)
        if entry is None:
            return None
        first, last = (start - slot.start) // entry.every, -(-(stop - slot.start) // entry.every)
        values = torch.empty(last - first, dtype=entry.dtype)
        self.files.read_range(entry, first, last, values)
        return values

    def _every(self, job: Conversion, kind: str) -> int:
        rule = self.rules.get(job.unit.dtype)
        specs = {spec.name: spec.every for spec in rule.specs} if rule is not None else {}
        return specs.get(kind, 1)


def _slots(job: Conversion) -> Iterator[tuple[Slot, int, int]]:
    for slot in job.unit.layout.slots:
        part = clip_range(slot.start, slot.stop, job.start, job.stop)
        if part is not None:
            yield slot, *part


def _whole_target(copies: Sequence[Copy], extents: Sequence[Extent]) -> torch.Tensor | None:
    """The memory of an array that takes exactly what is read, where there is such a one."""
    if len(copies) != 1 or len(extents) != 1:
        return None
    return direct_target(copies[0], extents[0].start, extents[0].stop)


def _store(array: Array, position: int, data: torch.Tensor) -> Waitable | None:
    direct = array.direct
    if direct is not None and direct.device.type == "cpu":
        _as_bytes(direct)[position : position + data.numel()].copy_(data)
        return None
    return array.evict(data.view(array.dtype), position // array.dtype.itemsize)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
