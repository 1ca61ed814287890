"""Where the elements of a tensor lie in files: pure arithmetic over boxes, runs and stretches.

A slice stores one *box* of a named global tensor: for every dim an interval or a sequence of them (queries, keys and
values in one matrix are cut like this), or a single interval over the flattened (row-major) tensor, which is what
partitioned flat buffers give. Readers know only *runs*: elements that follow one
another both in the flattened tensor and in a file. A box of any rank is a list of runs, so shards of
tensor- and pipeline-parallel jobs are read by the same code.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unbounded.ranks.cut import Box, Interval, Side


@dataclass(frozen=True)
class Slice:
    """A box of a tensor at `offset` of file number `file`, row-major."""

    file: int
    offset: int
    nbytes: int
    box: Box


@dataclass(frozen=True)
class FileRun:
    """Elements [start, stop) of the flattened tensor, from byte `offset` of a file on."""

    start: int
    stop: int
    file: int
    offset: int


def find_runs(piece: Slice, shape: Sequence[int], itemsize: int) -> Iterator[FileRun]:
    """The runs of one slice of a tensor of `shape`, in the order of the file."""
    box, shape = _with_dims(piece.box, shape)
    if not box:
        yield FileRun(0, 1, piece.file, piece.offset)
        return
    cut = _first_cut(box, shape)
    inner = math.prod(shape[cut + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(cut)]
    offset = piece.offset
    for outer in _indices(box[:cut]):
        base = sum(i * stride for i, stride in zip(outer, strides, strict=True))
        for first, last in intervals(box[cut]):
            yield FileRun(base + first * inner, base + last * inner, piece.file, offset)
            offset += (last - first) * inner * itemsize


def count_runs(piece: Slice, shape: Sequence[int]) -> int:
    """How many runs `find_runs` will give."""
    box, shape = _with_dims(piece.box, shape)
    cut = _first_cut(box, shape)
    return math.prod(length(side) for side in box[:cut]) * len(intervals(box[cut])) if box else 1


def intervals(side: Side) -> tuple[Interval, ...]:
    """The intervals of a side."""
    return side if side and isinstance(side[0], tuple) else (side,)  # type: ignore[return-value]


def length(side: Side) -> int:
    return sum(stop - start for start, stop in intervals(side))


def box_numel(box: Box) -> int:
    return math.prod(length(side) for side in box)


def _with_dims(box: Box, shape: Sequence[int]) -> tuple[Box, Sequence[int]]:
    """An interval over the flattened tensor is a box of a tensor of one dim."""
    return box, shape if len(box) == len(shape) else (math.prod(shape),)


def _first_cut(box: Box, shape: Sequence[int]) -> int:
    """The last dim that is not whole: what follows inside it is one run."""
    cut = len(shape) - 1
    while cut > 0 and box[cut] == (0, shape[cut]):
        cut -= 1
    return max(cut, 0)


def _indices(box: Box) -> Iterator[tuple[int, ...]]:
    if not box:
        yield ()
        return
    for interval in intervals(box[0]):
        for index in range(*interval):
            for rest in _indices(box[1:]):
                yield (index, *rest)


class RunMap:
    """All runs of one tensor, ready to be asked for any range of its elements."""

    def __init__(self, slices: Sequence[Slice], shape: Sequence[int], itemsize: int) -> None:
        self.itemsize, self.numel = itemsize, math.prod(shape)
        self.runs = sorted((run for s in slices for run in find_runs(s, shape, itemsize)), key=lambda run: run.start)
        self._starts = [run.start for run in self.runs]

    def covering(self, start: int, stop: int) -> list[FileRun]:
        """The runs that give [start, stop), clipped and without overlaps; nothing of it may be missing."""
        found, position = [], start
        index = max(0, bisect_right(self._starts, start) - 1)
        while position < stop:
            while index < len(self.runs) and self.runs[index].stop <= position:
                index += 1
            if index == len(self.runs) or self.runs[index].start > position:
                raise LookupError(position)
            run = self.runs[index]
            end = min(run.stop, stop)
            found.append(FileRun(position, end, run.file, run.offset + (position - run.start) * self.itemsize))
            position = end
        return found

    def first_gap(self) -> int | None:
        """The first element that no run holds, or None if all are there."""
        try:
            self.covering(0, self.numel)
        except LookupError as gap:
            return int(gap.args[0])
        return None


@dataclass(frozen=True)
class BlockRange:
    """Whole checksum blocks of one file that are read together."""

    start: int
    stop: int


def plan_blocks(ranges: Sequence[tuple[int, int]], edges: Sequence[int], gap_bytes: int) -> list[BlockRange]:
    """What to read of a file for byte ranges (start, stop): whole blocks, neighbours joined across small gaps."""
    joined: list[BlockRange] = []
    for first, last in sorted(ranges):
        if first >= last:
            continue
        start, stop = edges[bisect_right(edges, first) - 1], edges[bisect_left(edges, last)]
        if joined and start <= joined[-1].stop + gap_bytes:
            joined[-1] = BlockRange(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(BlockRange(start, stop))
    return joined


# Elements. What every rank holds is divided in such grains: at their boundaries every state array, even one with an
# entry for 128 elements, is on a page of the disk tier.
GRAIN = 2**19


def deal(numel: int, number: int, rank: int, size: int) -> tuple[int, int]:
    """The part that `rank` writes of `numel` elements that all `size` ranks hold; `number` varies who comes first."""
    grains = -(-numel // GRAIN)
    place = (rank + number) % size
    start, stop = grains * place // size, grains * (place + 1) // size
    return min(start * GRAIN, numel), min(stop * GRAIN, numel)
