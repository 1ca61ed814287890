"""Where an extent's bytes are: pure arithmetic over spans of files, no I/O.

Over several paths an extent is striped: stripe k is on path order[k mod P], and the part of an extent on one path is
one lane of consecutive bytes there. A lane is one span of the path's file if one is free, otherwise several. Every span
is whole pages.

Note: even within a stripe. The order begins with the path that has the most free, and so on. Whatever the sizes of the
extents are, no path then has more than one stripe more in use than another, as long as none is freed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from unbounded.native.disk.bindings import ALIGNMENT

STRIPE_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSpan:
    """Consecutive bytes of a file."""

    offset: int
    length: int


@dataclass(frozen=True)
class Extent:
    """A piece of a store: its number, its size, and for each path the spans that hold its lane.

    If it `is_new`, none of its bytes belonged to another extent before, so it reads as zeros until it is written.
    """

    number: int
    nbytes: int
    order: tuple[int, ...]  # of the paths
    lanes: tuple[tuple[FileSpan, ...], ...]
    is_new: bool = False


@dataclass(frozen=True)
class ExtentPart:
    """Consecutive bytes of an extent that are also consecutive in one file."""

    path: int
    offset: int  # in the file
    start: int  # in the extent
    length: int


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def lane_bytes(nbytes: int, num_paths: int) -> list[int]:
    """How much of an extent each path holds, in their order."""
    if num_paths == 1:
        return [round_up(nbytes, ALIGNMENT)]
    full, rest = divmod(nbytes, STRIPE_BYTES * num_paths)
    sizes = []
    for lane in range(num_paths):
        last = min(max(rest - lane * STRIPE_BYTES, 0), STRIPE_BYTES)
        sizes.append(round_up(full * STRIPE_BYTES + last, ALIGNMENT))
    return sizes


def parts(extent: Extent, start: int, length: int) -> Iterator[ExtentPart]:
    """The pieces of [start, start + length), in order."""
    num_paths = len(extent.lanes)
    position, end = start, start + length
    while position < end:
        if num_paths == 1:
            path, in_lane, size = 0, position, end - position
        else:
            stripe, inside = divmod(position, STRIPE_BYTES)
            path = extent.order[stripe % num_paths]
            in_lane = stripe // num_paths * STRIPE_BYTES + inside
            size = min(STRIPE_BYTES - inside, end - position)
        for span in _cut(extent.lanes[path], in_lane, size):
            yield ExtentPart(path, span.offset, position, span.length)
            position += span.length


def _cut(spans: tuple[FileSpan, ...], start: int, length: int) -> Iterator[FileSpan]:
    for span in spans:
        if start < span.length and length > 0:
            size = min(span.length - start, length)
            yield FileSpan(span.offset + start, size)
            length -= size
            start = 0
        else:
            start -= span.length


class FreeList:
    """The free spans of one file, sorted and joined."""

    def __init__(self, capacity_bytes: int) -> None:
        self._spans = [FileSpan(0, capacity_bytes)] if capacity_bytes else []
        self._used_to = 0  # nothing at or after this offset was ever taken

    @property
    def free_bytes(self) -> int:
        return sum(span.length for span in self._spans)

    def take(self, nbytes: int) -> tuple[FileSpan, ...] | None:
        """Spans of `nbytes` in total: the tightest single one, otherwise the largest few; None if too few are free."""
        if nbytes == 0:
            return ()
        fitting = [span for span in self._spans if span.length >= nbytes]
        if fitting:
            return (self._carve(min(fitting, key=lambda span: span.length), nbytes),)
        taken: list[FileSpan] = []
        for span in sorted(self._spans, key=lambda span: -span.length):
            left = nbytes - sum(piece.length for piece in taken)
            usable = left if span.length >= left else span.length // ALIGNMENT * ALIGNMENT
            if usable:
                taken.append(self._carve(span, usable))
            if usable == left:
                return tuple(taken)
        for piece in taken:
            self.give(piece)
        return None

    def _carve(self, span: FileSpan, nbytes: int) -> FileSpan:
        index = self._spans.index(span)
        rest = FileSpan(span.offset + nbytes, span.length - nbytes)
        self._spans[index : index + 1] = [rest] if rest.length else []
        return FileSpan(span.offset, nbytes)

    def claim(self, spans: tuple[FileSpan, ...]) -> bool:
        """Notes that these spans from `take` are in use; returns whether none of their bytes was ever used before."""
        is_new = all(span.offset >= self._used_to for span in spans)
        self._used_to = max([self._used_to, *(span.offset + span.length for span in spans)])
        return is_new

    def give(self, span: FileSpan) -> None:
        """Takes a span back and joins it with its neighbours."""
        index = bisect_left(self._spans, span.offset, key=lambda other: other.offset)
        self._spans.insert(index, span)
        for left in (index, index - 1):
            if 0 <= left < len(self._spans) - 1:
                first, second = self._spans[left : left + 2]
                if first.offset + first.length == second.offset:
                    self._spans[left : left + 2] = [FileSpan(first.offset, first.length + second.length)]
