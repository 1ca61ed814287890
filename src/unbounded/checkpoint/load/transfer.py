"""Brings verified bytes of a checkpoint into arrays on their tiers, in one pass over the files.

    read      | c2 | c3 |              whole blocks, several chunks ahead, each verified by the thread that read it
    put            | c1 | c0 |         into memory, onto the device, into the disk tier

Copies go in the order of the files, so every block is read once. A chunk that fills part of one array in host
memory is read straight into it. With `staged`, nothing is put in place before `install`, so a checkpoint that turns out
to be damaged has changed nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from unbounded.checkpoint.format.data_files import CHUNK_BYTES, Files, Read
from unbounded.checkpoint.format.manifest import WEIGHT
from unbounded.checkpoint.format.slices import BlockRange, plan_blocks
from unbounded.checkpoint.load.load_plan import (
    Conversion,
    Copy,
    StoredTensors,
    array_of,
    cut_copies,
    direct_target,
    stored_ranges,
)
from unbounded.held_interrupts import deliver
from unbounded.native.host_memory import host_buffer
from unbounded.observe import trace
from unbounded.optim import formats
from unbounded.tiers.array import Array, Waitable
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.pool import BufferPool, Lease
from unbounded.zero.layout import Slot, clip_range

# Chunks read ahead, and as many being put in place: enough to keep the disk busy while this thread waits for a core.
DEPTH = 8


@dataclass(eq=False)
class ReadChunk:
    """A stretch of one file being read: what was asked for, where it goes, what it waits for."""

    file: int
    start: int
    copies: list[Copy]
    blocks: list[BlockRange] = field(default_factory=list)
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    lease: Lease | None = None
    reads: list[Read] = field(default_factory=list)
    puts: list[Waitable] = field(default_factory=list)


class Transfer:
    """Carries out copies and conversions for one rank."""

    def __init__(
        self,
        files: Files,
        source: StoredTensors,
        pool: BufferPool,
        *,
        staged: bool,
    ) -> None:
        """`pool` must be free; all of it is returned, even after a failure."""
        self.files, self.source, self.pool, self.staged = files, source, pool, staged
        self._pipeline = ItemPipeline(self, num_ahead=DEPTH, num_unfinished=DEPTH, pool=pool)
        self._waiting: list[Callable[[], Waitable | None]] = []

    def install(self) -> None:
        """Puts everything that was staged where it belongs."""
        for put in self._waiting:
            wait = put()
            if wait is not None:
                wait.wait()
        self._waiting.clear()

    def later(self, action: Callable[[], None]) -> None:
        """Runs `action` now or, if things are staged, in `install`."""
        if self.staged:
            self._waiting.append(action)
        else:
            action()

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy(self, copies: Sequence[Copy]) -> None:
        chunk_bytes = min(CHUNK_BYTES, self.pool.buffer_bytes)
        parts = cut_copies(copies, self.files.manifest.files, chunk_bytes, direct=not self.staged)
        self._pipeline.run(ReadChunk(*part) for part in parts)

    def read(self, chunk: ReadChunk) -> None:
        """Starts reading a chunk: straight into its array if it fills part of one in host memory."""
        entry = self.files.manifest.files[chunk.file]
        ranges = [(copy.offset, copy.offset + copy.nbytes) for copy in chunk.copies]
        chunk.blocks = plan_blocks(ranges, entry.edges, entry.block_bytes)
        target = None if self.staged else _whole_target(chunk.copies, chunk.blocks)
        if target is None:
            chunk.lease = self._pipeline.lease()
            target = chunk.lease.tensor(torch.uint8, self.pool.buffer_bytes)
        chunk.buffer = target
        for blocks in chunk.blocks:
            base = blocks.start - chunk.start if chunk.lease is not None else 0
            part = target[base : base + blocks.stop - blocks.start]
            chunk.reads.append(self.files.read(chunk.file, blocks.start, part))

    def work(self, chunk: ReadChunk) -> None:
        """Waits for a chunk and puts it where it belongs."""
        deliver()
        for blocks, read in zip(chunk.blocks, chunk.reads, strict=True):
            read.wait()
            begun, ended = read.span_ns()
            trace.record("disk read", "checkpoint", begun, ended, bytes=blocks.stop - blocks.start)
        crossing = _crossing(chunk.copies)
        for copy in chunk.copies:
            base = copy.offset - chunk.start if chunk.lease is not None else 0
            data = chunk.buffer[base : base + copy.nbytes]
            if copy.gaps and id(copy) in crossing:  # what is padding here are values of another array
                data = data.clone()
            for first, last in copy.gaps:
                data[first:last].zero_()
            if chunk.lease is not None:
                self._put(copy.array, copy.position, data, chunk.puts)

    def finish(self, chunk: ReadChunk) -> None:
        for put in chunk.puts:
            put.wait()
        self._let_go(chunk)

    def abandon(self, chunk: ReadChunk) -> None:
        for wait in [*chunk.reads, *chunk.puts]:
            with contextlib.suppress(Exception):
                wait.wait()
        self._let_go(chunk)

    def _let_go(self, chunk: ReadChunk) -> None:
        chunk.reads.clear()
        chunk.puts.clear()
        if chunk.lease is not None:
            chunk.lease.release()
            chunk.lease = None

    def _put(self, array: Array, position: int, data: torch.Tensor, waits: list[Waitable]) -> None:
        """Bytes to byte `position` of an array; `data` may be reused once `waits` are over."""
        if self.staged:
            kept = data.clone()
            self._waiting.append(lambda: _store(array, position, kept))
            return
        wait = _store(array, position, data)
        if wait is not None:
            waits.append(wait)

    # -- conversions -----------------------------------------------------------------------------------------------

    def convert(self, conversions: Sequence[Conversion]) -> None:
        """Runs conversions one after another, because their cost is the conversion itself."""
        for conversion in conversions:
            deliver()
            arrays = self._encode(conversion)
            self._keep(conversion, arrays)
            waits: list[Waitable] = []
            for kind, values in arrays.items():
                array = array_of(conversion.unit, kind)
                every = conversion.unit.every.get(kind, 1)
                position = (conversion.start - conversion.unit.owned[0]) // every * array.dtype.itemsize
                self._put(array, position, _as_bytes(values), waits)
            for wait in waits:
                wait.wait()

    def _keep(self, job: Conversion, arrays: Mapping[str, torch.Tensor]) -> None:
        """Puts bytes that are stored in the right form."""
        for slot, start, stop in _slots(job):
            for kind in job.kinds if slot.start in job.kept else ():
                part = self._fetch(kind, slot, start, stop)
                assert part is not None
                arrays[kind][(start - job.start) // job.unit.every.get(kind, 1) :][: part.numel()].copy_(part)

    def _encode(self, job: Conversion) -> dict[str, torch.Tensor]:
        """Decodes the other values to fp32, slot by slot, and encodes all of them as the unit keeps them."""
        others = [part for part in _slots(job) if part[0].start not in job.kept]
        if not others:
            return {kind: self._empty(job, kind) for kind in job.kinds}
        rule = job.unit.rule
        flat = torch.zeros(job.stop - job.start, dtype=torch.float32, device="cpu")
        for slot, start, stop in others:
            values = self._decode(job.kinds[0], slot, start, stop)
            flat[start - job.start : stop - job.start].copy_(values)
        if job.kinds[0] == WEIGHT:
            encoded: Mapping[str, torch.Tensor] = formats.encode_weight(flat, job.unit.dtype, rule)
        else:
            assert rule is not None
            encoded = formats.encode_moment(flat, job.kinds[0], rule)
        return {kind: encoded[kind] for kind in job.kinds}

    @staticmethod
    def _empty(job: Conversion, kind: str) -> torch.Tensor:
        """Memory that a disk can be written from."""
        every, dtype = job.unit.every.get(kind, 1), array_of(job.unit, kind).dtype
        return host_buffer(-(-(job.stop - job.start) // every) * dtype.itemsize).view(dtype)

    def _decode(self, kind: str, slot: Slot, start: int, stop: int) -> torch.Tensor:
        if kind == WEIGHT:
            master = self._fetch("master", slot, start, stop)
            if master is not None:
                return master
            weight = self._fetch(WEIGHT, slot, start, stop)
            remainder = self._fetch("remainder", slot, start, stop)
            assert weight is not None
            if remainder is None:
                return weight
            stored: Any = SimpleNamespace(format="exact" if remainder.dtype == torch.int16 else "compact")
            return formats.decode_weight({"weight": weight, "remainder": remainder}, stored)
        if self.source.entry(f"{kind}_scale", slot.name) is not None:
            return self._decode_blocks(kind, slot, start, stop)
        values = self._fetch(kind, slot, start, stop)
        assert values is not None
        return values

    def _decode_blocks(self, kind: str, slot: Slot, start: int, stop: int) -> torch.Tensor:
        """A moment in blocks with one scale each, whose blocks are not aligned with this rank's part."""
        names, offset = (kind, f"{kind}_scale"), slot.first - slot.start
        entries = [entry for name in names if (entry := self.source.entry(name, slot.name)) is not None]
        every, position = entries[1].every, 0
        values = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for begin, end in stored_ranges(slot, start + offset, stop + offset):
            block, arrays = begin // every, {}
            for name, entry in zip(names, entries, strict=True):
                first, last = block * every // entry.every, -(-end // entry.every)
                arrays[name] = torch.empty(last - first, dtype=entry.dtype, device="cpu")
                self.files.read_range(entry, first, last, arrays[name])
            found = formats.decode_moment(arrays, kind)[begin - block * every :]
            values[position : position + end - begin].copy_(found)
            position += end - begin
        return values

    def _fetch(self, kind: str, slot: Slot, start: int, stop: int) -> torch.Tensor | None:
        """The stored elements of [start, stop) of the flat buffer, or None if there is no such state."""
        entry = self.source.entry(kind, slot.name)
        if entry is None:
            return None
        offset = slot.first - slot.start
        first, last = (start + offset) // entry.every, -(-(stop + offset) // entry.every)
        values, position = torch.empty(last - first, dtype=entry.dtype, device="cpu"), 0
        for begin, end in stored_ranges(slot, first, last, entry.every):
            self.files.read_range(entry, begin, end, values[position : position + end - begin])
            position += end - begin
        return values


def _slots(job: Conversion) -> Iterator[tuple[Slot, int, int]]:
    for slot in job.unit.layout.slots:
        part = clip_range(slot.start, slot.stop, job.start, job.stop)
        if part is not None:
            yield slot, *part


def _crossing(copies: Sequence[Copy]) -> set[int]:
    """The ids of the copies of which some bytes of the file are also in another copy."""
    found: set[int] = set()
    last = None  # the one so far that ends last
    for copy in sorted(copies, key=lambda copy: copy.offset):
        if last is not None and last.offset + last.nbytes > copy.offset:
            found |= {id(last), id(copy)}
        if last is None or copy.offset + copy.nbytes > last.offset + last.nbytes:
            last = copy
    return found


def _whole_target(copies: Sequence[Copy], blocks: Sequence[BlockRange]) -> torch.Tensor | None:
    """The memory of an array that takes exactly what is read, if there is one."""
    if len(copies) != 1 or len(blocks) != 1:
        return None
    return direct_target(copies[0], blocks[0].start, blocks[0].stop)


def _store(array: Array, position: int, data: torch.Tensor) -> Waitable | None:
    direct = array.direct
    if direct is not None and direct.device.type == "cpu":
        _as_bytes(direct)[position : position + data.numel()].copy_(data)
        return None
    return array.evict(data.view(array.dtype), position // array.dtype.itemsize)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
