"""Which part of a tensor a rank of the tensor axis holds. Pure arithmetic, shared by whoever lays out, saves and loads.

A cut is a sequence of intervals of one dim: one for a plain layer, three for queries, keys and values in one matrix,
and the same interval on several ranks if there are fewer key heads than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from unbounded.errors import PlanError
from unbounded.ranks.axis import Axis

Interval = tuple[int, int]
Side = Interval | tuple[Interval, ...]
Box = tuple[Side, ...]


@dataclass(frozen=True)
class Cut:
    """The part of a tensor of `shape` that one rank holds. `copies` ranks in a row hold the same one."""

    shape: tuple[int, ...]
    dim: int
    intervals: tuple[Interval, ...]
    copies: int = 1
    is_first: bool = True  # the first of its copies, which is the one that counts

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in self.intervals)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`, as a new tensor."""
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.intervals]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def put(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's part into `full`."""
        position = 0
        for start, stop in self.intervals:
            full.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, position, stop - start))
            position += stop - start

    def ranges(self, start: int, stop: int) -> Iterator[Interval]:
        """Elements [start, stop) of the flattened part as stretches of the flattened tensor, in order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        row = self.local_shape[self.dim] * inner
        last: Interval | None = None
        for outer in range(start // row, -(-stop // row)) if row else ():
            position = outer * row
            for first, end in self.intervals:
                length = (end - first) * inner
                low, high = max(start, position), min(stop, position + length)
                if low < high:
                    base = (outer * self.shape[self.dim] + first) * inner - position
                    if last is not None and last[1] == base + low:
                        last = last[0], base + high
                    else:
                        if last is not None:
                            yield last
                        last = base + low, base + high
                position += length
        if last is not None:
            yield last

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Elements [start, stop) of the flattened part as boxes of the tensor, each with where it begins in the part.

        The side of the dim that is cut may be several intervals.
        """
        for position, box in _boxes(self.local_shape, start, stop):
            yield position, (*box[: self.dim], self._side(*box[self.dim]), *box[self.dim + 1 :])

    def in_blocks(self, length: int) -> Cut | None:
        """The same part in blocks of `length` neighbouring elements; None if a rank's part is not whole blocks.

        The answer is the same on every rank.
        """
        inner, part = math.prod(self.shape[self.dim + 1 :]), self.local_shape[self.dim]
        edges = [self.shape[self.dim], *(edge for interval in self.intervals for edge in interval)]
        is_even = not part or self.shape[self.dim] % part == 0
        if inner % length and not (is_even and all(edge * inner % length == 0 for edge in edges)):
            return None
        outer = math.prod(self.shape[: self.dim])
        intervals = tuple((start * inner // length, stop * inner // length) for start, stop in self.intervals)
        return replace(self, shape=(outer, edges[0] * inner // length), dim=1, intervals=intervals)

    def _side(self, start: int, stop: int) -> Side:
        """[start, stop) of the part's dim in the tensor's."""
        found, position = [], 0
        for first, end in self.intervals:
            low, high = max(start, position), min(stop, position + end - first)
            if low < high:
                found.append((first + low - position, first + high - position))
            position += end - first
        return found[0] if len(found) == 1 else tuple(found)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[Interval, ...]]]:
    """A stretch of a flattened tensor as boxes, in order: the rest of a row, whole rows, the beginning of a row."""
    if start >= stop:
        return
    if not shape:
        yield start, ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        row = start // inner
        for position, box in _boxes(shape[1:], start - row * inner, stop - row * inner):
            yield row * inner + position, ((row, row + 1), *box)
        return
    if start < first * inner:
        row = first - 1
        for position, box in _boxes(shape[1:], start - row * inner, inner):
            yield row * inner + position, ((row, first), *box)
    if first < last:
        yield first * inner, ((first, last), *((0, size) for size in shape[1:]))
    if last * inner < stop:
        for position, box in _boxes(shape[1:], 0, stop - last * inner):
            yield last * inner + position, ((last, last + 1), *box)


def join_cut(cut: Cut, local: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All ranks of the axis must call this. The whole tensor of which every rank has a part, bit for bit."""
    whole = torch.zeros(cut.shape, dtype=local.dtype, device=local.device)
    if cut.is_first:
        cut.put(whole, local)
    axis.sum(
        whole.view(-1).view(torch.uint8)
    )  # adds bytes to zeros, so nothing is rounded and the sign of zero is kept
    return whole


def cut_evenly(shape: Sequence[int], dim: int, rank: int, size: int, *, sections: int = 1) -> Cut:
    """One part in `size` of each of `sections` equal stretches of `dim`; parts differ by at most one."""
    length, rest = divmod(shape[dim], sections)
    if rest:
        raise PlanError(f"a dim of {shape[dim]} does not divide into {sections} sections. Choose another style.")
    start, stop = share(length, rank, size)
    intervals = tuple((section * length + start, section * length + stop) for section in range(sections))
    return Cut(tuple(shape), dim, intervals)


def cut_heads(shape: Sequence[int], dim: int, rank: int, size: int, *, num_heads: int) -> Cut:
    """Whole heads; several neighbouring ranks get the same one if there are fewer heads than ranks."""
    width = shape[dim] // num_heads
    if num_heads >= size:
        first, last = share(num_heads, rank, size)
        return Cut(tuple(shape), dim, ((first * width, last * width),))
    copies = size // num_heads
    head = rank // copies
    return Cut(tuple(shape), dim, ((head * width, (head + 1) * width),), copies, rank % copies == 0)


def share(length: int, rank: int, size: int) -> Interval:
    """The part of `length` things that `rank` of `size` gets; the first ranks get one more if it does not divide."""
    whole, rest = divmod(length, size)
    start = rank * whole + min(rank, rest)
    return start, start + whole + (rank < rest)
