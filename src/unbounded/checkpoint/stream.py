"""One rank's data file as a stream: arrays of any tier go through bounded buffers into large aligned writes.

    read     | c2 | c3 |              states on disk or on a GPU into staging buffers
    check         | c1 |              CRC32C of every block
    write              | c0 |         asynchronous, straight from host memory where it holds a whole chunk

A large segment has chunks of its own, which are written straight from its array where that is in host memory;
small ones are put together in staging buffers, many to a chunk. Segments start on pages, so transfers from the disk
tier are aligned, and the padding between them is zero and checksummed like everything else.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unbounded.checkpoint.manifest import BLOCK_BYTES, FileEntry
from unbounded.checkpoint.reading import CHUNK_BYTES
from unbounded.native.disk import DiskFile, DiskHandle, crc32c
from unbounded.observe import trace
from unbounded.tiers.arena import HostArena
from unbounded.tiers.array import Array, Waitable
from unbounded.tiers.lane import Handle

# Half of them read ahead, half being written: enough that the disk stays busy while this thread waits for a core.
NUM_BUFFERS = 16
PAGE = 4096
LARGE_BYTES = BLOCK_BYTES


@dataclass(eq=False)
class Segment:
    """Elements [start, stop) of an array, to lie at `offset` of the file; `reader` is over when they were read."""

    array: Array
    start: int
    stop: int
    reader: Handle | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.array.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """The bytes [start, stop) of a segment, at `position` of a chunk."""

    segment: Segment
    start: int
    stop: int
    position: int


@dataclass(eq=False)
class Chunk:
    """A stretch of the file on its way: its parts, the buffer that holds it and what it waits for."""

    offset: int
    nbytes: int
    parts: list[Part]
    bytes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    staged: torch.Tensor | None = None
    waits: list[Waitable] = field(default_factory=list)
    writing: DiskHandle | None = None


@dataclass(frozen=True)
class FileLayout:
    """Where checksum blocks and chunks are counted from (see `FileEntry`), and the file's length."""

    starts: tuple[int, ...]
    nbytes: int


def lay_out(segments: Sequence[Segment]) -> FileLayout:
    """Gives every segment its place, each on a page. Large ones have a start of their own, small ones share one."""
    starts, offset, shared = [0], 0, 0
    for segment in segments:
        is_large = segment.nbytes >= LARGE_BYTES
        if offset > starts[-1] and (is_large or shared < 0 or offset - shared >= CHUNK_BYTES):
            starts.append(offset)
        shared = -1 if is_large else starts[-1]
        segment.offset = offset
        offset += -(-segment.nbytes // PAGE) * PAGE
    return FileLayout(tuple(starts), offset)


def cut_chunks(segments: Sequence[Segment], layout: FileLayout) -> Iterator[Chunk]:
    """The chunks of the file in order, each with the parts of segments inside it."""
    index = 0
    for first, last in zip(layout.starts, [*layout.starts[1:], layout.nbytes], strict=True):
        for offset in range(first, last, CHUNK_BYTES):
            stop = min(offset + CHUNK_BYTES, last)
            parts = []
            while index < len(segments) and segments[index].offset < stop:
                segment = segments[index]
                begin, end = max(offset, segment.offset), min(stop, segment.offset + segment.nbytes)
                if begin < end:
                    parts.append(Part(segment, begin - segment.offset, end - segment.offset, begin - offset))
                if segment.offset + segment.nbytes > stop:
                    break
                index += 1
            yield Chunk(offset, stop - offset, parts)


class Writer:
    """Carries the chunks of one file, and completes the readers of segments as their last bytes are read."""

    def __init__(self, file: DiskFile, arena: HostArena) -> None:
        self.file, self.arena = file, arena
        self._free: list[torch.Tensor] = []
        self._num_buffers = 0
        self._ahead: deque[Chunk] = deque()
        self._behind: deque[Chunk] = deque()
        self._pending: dict[int, int] = {}

    def write(self, name: str, segments: Sequence[Segment]) -> FileEntry:
        """Writes all segments, waits for them and syncs the file."""
        layout = lay_out(segments)
        self._count(segments, layout)
        sums: list[int] = []
        try:
            for chunk in cut_chunks(segments, layout):
                self._read(chunk)
                self._ahead.append(chunk)
                if len(self._ahead) > NUM_BUFFERS // 2:
                    sums += self._check_and_write(self._ahead.popleft())
            while self._ahead:
                sums += self._check_and_write(self._ahead.popleft())
            while self._behind:
                self._finish(self._behind.popleft())
        finally:
            self._abandon()
        self.file.sync()
        return FileEntry(name, layout.nbytes, BLOCK_BYTES, layout.starts, tuple(sums))

    def _count(self, segments: Sequence[Segment], layout: FileLayout) -> None:
        """Counts the chunks that every reader's segments are in."""
        for chunk in cut_chunks(segments, layout):
            for reader in _readers(chunk):
                self._pending[id(reader)] = self._pending.get(id(reader), 0) + 1

    def _read(self, chunk: Chunk) -> None:
        direct = _whole_part(chunk)
        if direct is not None:
            chunk.bytes = direct
            return
        chunk.staged = self._buffer()
        chunk.bytes = chunk.staged[: chunk.nbytes]
        position = 0
        for part in chunk.parts:
            chunk.bytes[position : part.position].zero_()
            position = part.position + part.stop - part.start
            segment, dtype = part.segment, part.segment.array.dtype
            target = chunk.bytes[part.position : position].view(dtype)
            chunk.waits.append(segment.array.fetch(target, segment.start + part.start // dtype.itemsize))
        chunk.bytes[position:].zero_()

    def _check_and_write(self, chunk: Chunk) -> list[int]:
        for wait in chunk.waits:
            wait.wait()
        chunk.waits.clear()
        if chunk.staged is not None:
            self._tell(chunk)
        sums = [crc32c(block) for block in chunk.bytes.split(BLOCK_BYTES)]
        chunk.writing = self.file.write(chunk.offset, chunk.bytes)
        self._behind.append(chunk)
        while len(self._behind) > NUM_BUFFERS // 2:
            self._finish(self._behind.popleft())
        return sums

    def _finish(self, chunk: Chunk) -> None:
        assert chunk.writing is not None
        chunk.writing.wait()
        start, stop = chunk.writing.span_ns()
        trace.record("disk write", "checkpoint", start, stop, bytes=chunk.nbytes)
        if chunk.staged is None:
            self._tell(chunk)
        else:
            self._free.append(chunk.staged)

    def _tell(self, chunk: Chunk) -> None:
        """The chunk's bytes are safe from changes now: readers with nothing left to read are over."""
        for reader in _readers(chunk):
            self._pending[id(reader)] -= 1
            if not self._pending[id(reader)]:
                reader.complete()

    def _buffer(self) -> torch.Tensor:
        while not self._free and self._num_buffers >= NUM_BUFFERS + 1 and self._behind:
            self._finish(self._behind.popleft())
        if self._free:
            return self._free.pop()
        self._num_buffers += 1
        return self.arena.allocate(torch.uint8, CHUNK_BYTES)

    def _abandon(self) -> None:
        """Waits for whatever is still in flight after a failure, and gives the buffers back."""
        for chunk in [*self._ahead, *self._behind]:
            for wait in [*chunk.waits, *([chunk.writing] if chunk.writing else [])]:
                with contextlib.suppress(OSError):  # the first failure is the one that is told
                    wait.wait()
            if chunk.staged is not None:
                self._free.append(chunk.staged)
        self._ahead.clear()
        self._behind.clear()
        for buffer in self._free:
            self.arena.release(buffer)
        self._free.clear()
        self._num_buffers = 0


def _readers(chunk: Chunk) -> list[Handle]:
    """The readers of a chunk's segments, each once."""
    found = {id(part.segment.reader): part.segment.reader for part in chunk.parts}
    return [reader for reader in found.values() if reader is not None]


def _whole_part(chunk: Chunk) -> torch.Tensor | None:
    """The chunk's bytes where one array in host memory holds all of them on whole pages."""
    if len(chunk.parts) != 1:
        return None
    part = chunk.parts[0]
    direct = part.segment.array.direct
    if direct is None or direct.device.type != "cpu" or part.stop - part.start != chunk.nbytes:
        return None
    start = part.segment.start * direct.element_size()
    return direct.view(torch.uint8)[start + part.start : start + part.stop]
