"""Partition arithmetic: where each parameter is in its unit's flat buffer, and which part each rank owns.

Pure functions over frozen values. A unit's flat buffer holds its parameters one after another, each starting
on a multiple of ALIGN elements, ordered by optimizer group so that a group is one contiguous run; the whole is
padded so that every rank owns an equal shard that again starts on a multiple of ALIGN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unbounded.ranks.cut import Cut

# Elements. A multiple of the compact format's block and of every SIMD width, so that neither blocks nor
# vectors ever straddle two parameters or two shards.
ALIGN = 128
# If an update needs whole parameters, each is brought from its tier by itself, so it begins on a page of the disk in
# every array, whatever the size of its elements.
WHOLE_ALIGN = 4096


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
    first: int = 0  # element of the whole parameter that this begins with, if it is a tile
    whole: tuple[int, ...] | None = None  # the shape of the whole parameter, if this is a tile
    cut: Cut | None = None  # which part of the global tensor this is, if the tensor axis cuts it
    is_counted: bool = True  # in sums over the whole model; if several ranks hold it, one counts it

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part of the parameter, of which this may be a tile."""
        return self.shape if self.whole is None else self.whole

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.local_shape if self.cut is None else self.cut.shape

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
        """The stretch that belongs to slot `index`, with the padding after it."""
        stop = self.slots[index + 1].start if index + 1 < len(self.slots) else self.numel
        return self.slots[index].start, stop


def lay_out(
    parameters: Sequence[tuple[str, tuple[int, ...], int]],
    num_shards: int,
    cuts: Mapping[str, Cut] | None = None,
    uncounted: frozenset[str] = frozenset(),
    align: int = ALIGN,
) -> Layout:
    """The layout of `parameters` (name, shape, group), kept in order inside each group."""
    slots, start = [], 0
    for name, shape, group in sorted(parameters, key=lambda entry: entry[2]):
        numel = 1
        for size in shape:
            numel *= size
        cut = (cuts or {}).get(name)
        slots.append(Slot(name, shape, numel, start, group, cut=cut, is_counted=name not in uncounted))
        start += round_up(numel, align)
    return Layout(tuple(slots), round_up(start, align * num_shards), num_shards)


def deal_slots(layout: Layout, first: int) -> tuple[int, ...]:
    """The rank that makes each parameter whole for an update: the largest first, to the rank with the least so far.

    `first` is the rank to begin with, which varies from unit to unit.
    """
    homes, loads = [0] * len(layout.slots), [0] * layout.num_shards
    order = [(rank + first) % layout.num_shards for rank in range(layout.num_shards)]
    for index in sorted(range(len(homes)), key=lambda index: -layout.slots[index].numel):
        homes[index] = min(order, key=loads.__getitem__)
        loads[homes[index]] += layout.slots[index].numel
    return tuple(homes)


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


def counted_ranges(layout: Layout, owned: tuple[int, int]) -> list[tuple[int, int]] | None:
    """The stretches inside the owned part that count in sums over the model; None if all of it does."""
    if all(slot.is_counted for slot in layout.slots):
        return None
    runs = find_runs(layout, [slot.is_counted or None for slot in layout.slots])
    parts = [clip_range(run.start, run.stop, *owned) for run in runs]
    return [(part[0] - owned[0], part[1] - owned[0]) for part in parts if part is not None]


def clip_range(start: int, stop: int, low: int, high: int) -> tuple[int, int] | None:
    """The part of [start, stop) inside [low, high), or None if they do not meet."""
    start, stop = max(start, low), min(stop, high)
    return (start, stop) if start < stop else None
