"""The data file of one rank before it is written: which stretch of which array goes where, and in which chunks.

A large segment has its own chunks, which can be written straight from its array if that is in host memory; small ones
are put together, many to a chunk. Segments start on pages, so that transfers from the disk tier are
aligned; the padding between them is zero and checksummed like everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unbounded.checkpoint.format.data_files import CHUNK_BYTES
from unbounded.checkpoint.format.manifest import BLOCK_BYTES, PAGE
from unbounded.native.disk import Checksums, DiskHandle
from unbounded.tiers.array import Array, Waitable
from unbounded.tiers.pool import Lease
from unbounded.tiers.reader import Reader

LARGE_BYTES = BLOCK_BYTES


@dataclass(eq=False)
class FileSegment:
    """`numel` elements, for `offset` of the file; `reader` is finished when they have been read.

    `place` is the array that holds them and where in it they begin. It may change to a copy while a save runs.
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
class SegmentPart:
    """The bytes [start, stop) of a segment, at `position` of a chunk."""

    segment: FileSegment
    start: int
    stop: int
    position: int


@dataclass(eq=False)
class WriteChunk:
    """A stretch of the file being written: its parts, the buffer that holds it and what it waits for."""

    offset: int
    nbytes: int
    parts: list[SegmentPart]
    bytes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    lease: Lease | None = None
    waits: list[Waitable] = field(default_factory=list)
    writing: DiskHandle | None = None
    sums: Checksums | None = None

    @property
    def is_direct(self) -> bool:
        """Whether one array in host memory holds all of it, on whole pages, and no buffer is needed."""
        if len(self.parts) != 1:
            return False
        part = self.parts[0]
        return part.segment.is_in_host_memory and part.stop - part.start == self.nbytes

    def direct_bytes(self) -> torch.Tensor:
        """The memory that holds it, if `is_direct`."""
        part = self.parts[0]
        array, first = part.segment.place
        assert array.direct is not None
        start = first * array.dtype.itemsize
        return array.direct.view(torch.uint8)[start + part.start : start + part.stop]


@dataclass(frozen=True)
class FileLayout:
    """Where checksum blocks and chunks are counted from (see `FileEntry`), and the file's length."""

    starts: tuple[int, ...]
    nbytes: int


def lay_out(segments: Sequence[FileSegment]) -> FileLayout:
    """Gives every segment its place, each on a page. Large ones have their own start; small ones share one."""
    starts, offset, shared = [0], 0, 0
    for segment in segments:
        is_large = segment.nbytes >= LARGE_BYTES
        if offset > starts[-1] and (is_large or shared < 0 or offset - shared >= CHUNK_BYTES):
            starts.append(offset)
        shared = -1 if is_large else starts[-1]
        segment.offset = offset
        offset += -(-segment.nbytes // PAGE) * PAGE
    return FileLayout(tuple(starts), offset)


def cut_chunks(segments: Sequence[FileSegment], layout: FileLayout, chunk_bytes: int) -> Iterator[WriteChunk]:
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
                    parts.append(SegmentPart(segment, begin - segment.offset, end - segment.offset, begin - offset))
                if segment.offset + segment.nbytes > stop:
                    break
                index += 1
            yield WriteChunk(offset, stop - offset, parts)
