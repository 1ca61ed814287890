"""Where the elements of a tensor lie in files: pure arithmetic over boxes, runs and stretches.

A slice stores one *box* of a named global tensor: an interval for every dim, or a single interval over the
flattened (row-major) tensor, which is what partitioned flat buffers give. Readers know only *runs*: elements that
follow one another both in the flattened tensor and in a file. A box of any rank is a list of runs, so shards of
tensor- and pipeline-parallel jobs are read by the same code.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slice:
    """A box of a tensor at `offset` of file number `file`, row-major."""

    file: int
    offset: int
    nbytes: int
    box: Box


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of the flattened tensor, from byte `offset` of a file on."""

    start: int
    stop: int
    file: int
    offset: int


def box_numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def find_runs(piece: Slice, shape: Sequence[int], itemsize: int) -> Iterator[Run]:
    """The runs of one slice of a tensor of `shape`, in the order of the file."""
    box = piece.box
    if len(box) == 1 and len(shape) != 1:
        box, shape = piece.box, (math.prod(shape),)
    if not box:
        yield Run(0, 1, piece.file, piece.offset)
        return
    # From the first dim on that is not whole, what follows inside it is one run.
    cut = len(shape) - 1
    while cut > 0 and box[cut] == (0, shape[cut]):
        cut -= 1
    inner = math.prod(shape[cut + 1 :])
    length = (box[cut][1] - box[cut][0]) * inner
    strides = [math.prod(shape[dim + 1 :]) for dim in range(cut)]
    offset = piece.offset
    for outer in _indices(box[:cut]):
        start = sum(i * stride for i, stride in zip(outer, strides, strict=True)) + box[cut][0] * inner
        yield Run(start, start + length, piece.file, offset)
        offset += length * itemsize


def _indices(box: Box) -> Iterator[tuple[int, ...]]:
    if not box:
        yield ()
        return
    for index in range(*box[0]):
        for rest in _indices(box[1:]):
            yield (index, *rest)


class RunMap:
    """All runs of one tensor, ready to be asked for any range of its elements."""

    def __init__(self, slices: Sequence[Slice], shape: Sequence[int], itemsize: int) -> None:
        self.itemsize, self.numel = itemsize, math.prod(shape)
        self.runs = sorted((run for s in slices for run in find_runs(s, shape, itemsize)), key=lambda run: run.start)
        self._starts = [run.start for run in self.runs]

    def covering(self, start: int, stop: int) -> list[Run]:
        """The runs that give [start, stop), clipped and without overlaps; None of it may be missing."""
        found, position = [], start
        index = max(0, bisect_right(self._starts, start) - 1)
        while position < stop:
            while index < len(self.runs) and self.runs[index].stop <= position:
                index += 1
            if index == len(self.runs) or self.runs[index].start > position:
                raise LookupError(position)
            run = self.runs[index]
            end = min(run.stop, stop)
            found.append(Run(position, end, run.file, run.offset + (position - run.start) * self.itemsize))
            position = end
        return found

    def first_gap(self) -> int | None:
        """The first element that no run holds, or None where all are there."""
        try:
            self.covering(0, self.numel)
        except LookupError as gap:
            return int(gap.args[0])
        return None


@dataclass(frozen=True)
class Extent:
    """Whole checksum blocks of one file that are read together."""

    start: int
    stop: int


def plan_extents(ranges: Sequence[tuple[int, int]], edges: Sequence[int], gap_bytes: int) -> list[Extent]:
    """What to read of a file for byte ranges (start, stop): whole blocks, neighbours joined across small gaps."""
    joined: list[Extent] = []
    for first, last in sorted(ranges):
        if first >= last:
            continue
        start, stop = edges[bisect_right(edges, first) - 1], edges[bisect_left(edges, last)]
        if joined and start <= joined[-1].stop + gap_bytes:
            joined[-1] = Extent(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(Extent(start, stop))
    return joined


# Elements. The parts of what every rank holds are dealt out in such grains: at their boundaries every state array,
# also one with an entry for 128 elements, is on a page of the disk tier.
GRAIN = 2**19


def deal(numel: int, number: int, rank: int, size: int) -> tuple[int, int]:
    """The part that `rank` writes of `numel` elements that all `size` ranks hold; `number` varies who comes first."""
    grains = -(-numel // GRAIN)
    place = (rank + number) % size
    start, stop = grains * place // size, grains * (place + 1) // size
    return min(start * GRAIN, numel), min(stop * GRAIN, numel)
