"""Brings the parts of parameters to where their update runs, and back: two exchanges among the ranks per piece.

Every rank has a stretch of each parameter. Its *home* gets all of them, updates the whole, and gives every rank its
stretch back. Which bytes go where follows from the layout, so ranks need not ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unbounded.native.bulk import new_tensor
from unbounded.ranks.axis import Axis
from unbounded.zero.layout import clip_range
from unbounded.zero.unit import Unit

Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Route:
    """One stretch of one parameter, of the rank `owner`."""

    slot: int
    owner: int
    start: int  # inside the parameter
    stop: int


class HomeExchange:
    """Moves stretches between the ranks of one axis. All of them must make the same calls in the same order."""

    def __init__(self, ranks: Axis) -> None:
        self._ranks = ranks

    def bring(
        self, unit: Unit, slots: Sequence[int], buffers: Buffers, first: int
    ) -> dict[int, dict[str, torch.Tensor]]:
        """The whole flat arrays of those `slots` that are at home here.

        `buffers` hold this rank's part of each array, from element `first` of the unit's flat buffer on.
        """
        routes, rank = _routes(unit, slots), self._ranks.rank
        wholes = {
            slot: {name: buffer.new_empty(unit.layout.slots[slot].numel) for name, buffer in buffers.items()}
            for slot in slots
            if unit.homes[slot] == rank
        }
        sent = [self._own(unit, route, buffers, first) for h in self._all for route in routes[rank, h]]
        received = [_part(wholes[route.slot], route) for owner in self._all for route in routes[owner, rank]]
        self._move(unit, sent, received, routes, buffers, is_back=False)
        return wholes

    def give_back(
        self,
        unit: Unit,
        slots: Sequence[int],
        wholes: Mapping[int, Buffers],
        buffers: Buffers,
        first: int,
    ) -> None:
        """Every rank's stretches of what was changed at home, into its `buffers`."""
        routes, rank = _routes(unit, slots), self._ranks.rank
        kept = {slot: {name: held[name] for name in buffers} for slot, held in wholes.items()}
        sent = [_part(kept[route.slot], route) for owner in self._all for route in routes[owner, rank]]
        received = [self._own(unit, route, buffers, first) for h in self._all for route in routes[rank, h]]
        self._move(unit, sent, received, routes, buffers, is_back=True)

    @property
    def _all(self) -> range:
        return range(self._ranks.size)

    def _own(self, unit: Unit, route: Route, buffers: Buffers, first: int) -> list[torch.Tensor]:
        start = unit.layout.slots[route.slot].start + route.start - first
        return [buffer[start : start + route.stop - route.start] for buffer in buffers.values()]

    def _move(
        self,
        unit: Unit,
        sent: Sequence[Sequence[torch.Tensor]],
        received: Sequence[Sequence[torch.Tensor]],
        routes: Mapping[tuple[int, int], Sequence[Route]],
        buffers: Buffers,
        *,
        is_back: bool,
    ) -> None:
        """Moves them as bytes, so that arrays of all dtypes go in one exchange."""
        width, rank = sum(buffer.element_size() for buffer in buffers.values()), self._ranks.rank
        out = [width * sum(r.stop - r.start for r in routes[rank, h]) for h in self._all]
        into = [width * sum(r.stop - r.start for r in routes[owner, rank]) for owner in self._all]
        if is_back:
            out, into = into, out
        packed = torch.cat([part.view(torch.uint8) for row in sent for part in row] or [_nothing(unit)])
        landed = new_tensor(sum(into), torch.uint8, unit.device)
        self._ranks.exchange(landed, packed, unit.name, f"unit {unit.name!r}", (into, out))
        position = 0
        for part in (part.view(torch.uint8) for row in received for part in row):
            part.copy_(landed[position : position + part.numel()])
            position += part.numel()


def _nothing(unit: Unit) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=unit.device)


def _part(whole: Buffers, route: Route) -> list[torch.Tensor]:
    return [array[route.start : route.stop] for array in whole.values()]


def _routes(unit: Unit, slots: Sequence[int]) -> dict[tuple[int, int], list[Route]]:
    """The stretches by who owns them and where they are at home."""
    layout = unit.layout
    ranks = range(layout.num_shards)
    found: dict[tuple[int, int], list[Route]] = {(owner, home): [] for owner in ranks for home in ranks}
    for index in slots:
        slot = layout.slots[index]
        for owner in ranks:
            part = clip_range(slot.start, slot.stop, *layout.shard_range(owner))
            if part is not None:
                route = Route(index, owner, part[0] - slot.start, part[1] - slot.start)
                found[owner, unit.homes[index]].append(route)
    return found
