"""Partition arithmetic: where each parameter lies in its unit's flat buffer and which part each rank owns.

Pure functions over frozen values. A unit's flat buffer holds its parameters one after another, each starting
on a multiple of ALIGN elements, ordered by optimizer group so that a group is one contiguous run; the whole is
padded so that every rank owns an equal shard that again starts on a multiple of ALIGN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Elements. A multiple of the compact format's block and of every SIMD width, so that neither blocks nor
# vectors ever straddle two parameters or two shards.
ALIGN = 128


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer of its unit."""

    name: str
    shape: tuple[int, ...]
    numel: int
    start: int
    group: int  # index of the optimizer's group, -1 for a frozen parameter

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Run:
    """A stretch of the flat buffer, padding included, whose parameters share one optimizer group."""

    start: int
    stop: int
    group: int
    first: int  # index of the first slot
    last: int  # index past the last slot


@dataclass(frozen=True)
class Layout:
    """The flat buffer of a unit and its partition over `num_shards` ranks."""

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def slot_span(self, index: int) -> tuple[int, int]:
        """The stretch that belongs to slot `index`, with the padding behind it."""
        stop = self.slots[index + 1].start if index + 1 < len(self.slots) else self.numel
        return self.slots[index].start, stop


def lay_out(parameters: Sequence[tuple[str, tuple[int, ...], int]], num_shards: int) -> Layout:
    """The layout of `parameters` (name, shape, group), kept in order inside each group."""
    slots, start = [], 0
    for name, shape, group in sorted(parameters, key=lambda entry: entry[2]):
        numel = 1
        for size in shape:
            numel *= size
        slots.append(Slot(name, shape, numel, start, group))
        start += round_up(numel, ALIGN)
    return Layout(tuple(slots), round_up(start, ALIGN * num_shards), num_shards)


def find_runs(layout: Layout, keys: Sequence[object]) -> list[Run]:
    """The maximal stretches whose slots have equal `keys` (one per slot); a slot with key None is left out."""
    runs: list[Run] = []
    previous: object = None
    for index, key in enumerate(keys):
        start, stop = layout.slot_span(index)
        if key is None:
            previous = None
        elif runs and key == previous and runs[-1].last == index:
            last = runs[-1]
            runs[-1] = Run(last.start, stop, last.group, last.first, index + 1)
        else:
            runs.append(Run(start, stop, layout.slots[index].group, index, index + 1))
            previous = key
    return runs


def clip_range(start: int, stop: int, low: int, high: int) -> tuple[int, int] | None:
    """The part of [start, stop) inside [low, high), or None where they do not meet."""
    start, stop = max(start, low), min(stop, high)
    return (start, stop) if start < stop else None
