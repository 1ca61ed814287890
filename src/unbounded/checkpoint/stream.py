"""One rank's data file as a stream: arrays of any tier go through bounded buffers into large aligned writes.

    read     | c2 | c3 |              states on disk or on a GPU into staging buffers
    write         | c0 | c1 |         CRC32C of every block, then the write, on the threads of the disk engine

A large segment has chunks of its own, which are written straight from its array where that is in host memory;
small ones are put together in staging buffers, many to a chunk. Segments start on pages, so transfers from the disk
tier are aligned, and the padding between them is zero and checksummed like everything else. This thread touches no
byte of what is large: it may be beside a training loop, whose interpreter it shares.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from unbounded.checkpoint.manifest import BLOCK_BYTES, FileEntry
from unbounded.checkpoint.reading import CHUNK_BYTES
from unbounded.native.disk import Checksums, DiskFile, DiskHandle
from unbounded.observe import trace
from unbounded.tiers.array import Array, Waitable
from unbounded.tiers.pool import BufferPool, Lease
from unbounded.tiers.reader import Reader

if TYPE_CHECKING:
    from unbounded.checkpoint.readers import Readers

# Chunks being written: enough that the disk stays busy while this thread waits for a core.
DEPTH = 8
PAGE = 4096
LARGE_BYTES = BLOCK_BYTES


@dataclass(eq=False)
class Segment:
    """`numel` elements, to lie at `offset` of the file; `reader` is over when they were read.

    `place` is the array that holds them and where in it they begin, and may change to a copy's while a save runs.
    """

    place: tuple[Array, int]
    numel: int
    reader: Reader | None = None
    offset: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.place[0].dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_in_host_memory(self) -> bool:
        direct = self.place[0].direct
        return direct is not None and direct.device.type == "cpu"


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
    lease: Lease | None = None
    waits: list[Waitable] = field(default_factory=list)
    writing: DiskHandle | None = None
    sums: Checksums | None = None


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


def cut_chunks(segments: Sequence[Segment], layout: FileLayout, chunk_bytes: int) -> Iterator[Chunk]:
    """The chunks of the file in order, each with the parts of segments inside it."""
    index = 0
    for first, last in zip(layout.starts, [*layout.starts[1:], layout.nbytes], strict=True):
        for offset in range(first, last, chunk_bytes):
            stop = min(offset + chunk_bytes, last)
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
    """Writes segments into one file. `staging` must be free; all of it is given back, also after a failure."""

    def __init__(self, file: DiskFile, staging: BufferPool, readers: Readers) -> None:
        self.file, self.staging, self.readers = file, staging, readers
        self._ahead: deque[Chunk] = deque()
        self._behind: deque[Chunk] = deque()
        self._num_leased = 0

    def write(self, name: str, segments: Sequence[Segment]) -> FileEntry:
        """Writes all segments, waits for them and syncs the file."""
        layout = lay_out(segments)
        chunks = list(cut_chunks(segments, layout, min(CHUNK_BYTES, self.staging.buffer_bytes)))
        self.readers.expect(chunks)
        try:
            for chunk in chunks:
                self._begin(chunk)
            while self._ahead:
                self._write(self._ahead.popleft())
            while self._behind:
                self._finish(self._behind.popleft())
        finally:
            self._abandon(chunks)
        self.file.sync()
        sums = [value for chunk in chunks if chunk.sums is not None for value in chunk.sums.values()]
        return FileEntry(name, layout.nbytes, BLOCK_BYTES, layout.starts, tuple(sums))

    def _begin(self, chunk: Chunk) -> None:
        """Writes a chunk that lies in host memory; starts bringing any other into a buffer."""
        self.readers.begin(chunk)
        direct = _whole_part(chunk)
        if direct is not None:
            chunk.bytes = direct
            self._write(chunk)
            return
        self._stage(chunk)
        self._ahead.append(chunk)
        if len(self._ahead) > self.staging.count // 2:
            self._write(self._ahead.popleft())

    def _stage(self, chunk: Chunk) -> None:
        chunk.lease = self._lease()
        chunk.bytes = chunk.lease.tensor(torch.uint8, chunk.nbytes)
        position = 0
        for part in chunk.parts:
            chunk.bytes[position : part.position].zero_()
            position = part.position + part.stop - part.start
            array, start = part.segment.place
            target = chunk.bytes[part.position : position].view(array.dtype)
            chunk.waits.append(array.fetch(target, start + part.start // array.dtype.itemsize))
        chunk.bytes[position:].zero_()

    def _write(self, chunk: Chunk) -> None:
        for wait in chunk.waits:
            wait.wait()
        chunk.waits.clear()
        if chunk.lease is not None:
            self.readers.end(chunk)
        chunk.sums = Checksums.empty(BLOCK_BYTES, chunk.nbytes)
        chunk.writing = self.file.write(chunk.offset, chunk.bytes, chunk.sums)
        self._behind.append(chunk)
        while len(self._behind) > DEPTH:
            self._finish(self._behind.popleft())

    def _finish(self, chunk: Chunk) -> None:
        assert chunk.writing is not None
        chunk.writing.wait()
        start, stop = chunk.writing.span_ns()
        trace.record("disk write", "checkpoint", start, stop, bytes=chunk.nbytes)
        if chunk.lease is None:
            self.readers.end(chunk)
        self._let_go(chunk)

    def _lease(self) -> Lease:
        """A staging buffer. All that are out are this writer's own, so it goes on with them rather than wait."""
        while self._num_leased == self.staging.count:
            if self._behind:
                self._finish(self._behind.popleft())
            else:
                self._write(self._ahead.popleft())
        self._num_leased += 1
        return self.staging.lease()

    def _let_go(self, chunk: Chunk) -> None:
        chunk.writing, chunk.bytes = None, chunk.bytes[:0]
        if chunk.lease is not None:
            chunk.lease.release()
            chunk.lease = None
            self._num_leased -= 1

    def _abandon(self, chunks: Sequence[Chunk]) -> None:
        """Waits for whatever is still in flight after a failure, and gives the buffers back."""
        self._ahead.clear()
        self._behind.clear()
        for chunk in chunks:
            for wait in [*chunk.waits, *([chunk.writing] if chunk.writing else [])]:
                with contextlib.suppress(Exception):  # the first failure is the one that is told
                    wait.wait()
            chunk.waits.clear()
            self._let_go(chunk)


def _whole_part(chunk: Chunk) -> torch.Tensor | None:
    """The chunk's bytes where one array in host memory holds all of them on whole pages."""
    if len(chunk.parts) != 1:
        return None
    part = chunk.parts[0]
    array, first = part.segment.place
    if array.direct is None or array.direct.device.type != "cpu" or part.stop - part.start != chunk.nbytes:
        return None
    start = first * array.dtype.itemsize
    return array.direct.view(torch.uint8)[start + part.start : start + part.stop]
