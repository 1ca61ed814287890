"""States of a unit that do not have their parameters' shapes: rows and columns of factored moments.

A parameter's factors belong to the rank that makes it whole for its update (its *home*), all of them in one flat array.
They are small, a row and a column for a matrix, so they never go to disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unbounded.optim.rules import Granularity, UpdateRule
from unbounded.tiers.array import Array
from unbounded.zero.layout import Layout


@dataclass(frozen=True)
class Factor:
    """One factor of the parameter in `slot`, from element `start` of the array on."""

    slot: int
    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def find_factors(layout: Layout, rule: UpdateRule | None, homes: Sequence[int], home: int | None) -> tuple[Factor, ...]:
    """The factors that the rank `home` keeps of a unit; None keeps those of all ranks."""
    found: list[Factor] = []
    if rule is None or rule.granularity is not Granularity.TENSOR:
        return ()
    for index, slot in enumerate(layout.slots):
        if home is None or homes[index] == home:
            for name, shape in rule.factor_shapes(slot.shape).items():
                found.append(Factor(index, name, shape, found[-1].stop if found else 0))
    return tuple(found)


class Factors:
    """The factors of one unit on this rank."""

    def __init__(self, held: Sequence[Factor] = (), array: Array | None = None) -> None:
        self.held, self.array = tuple(held), array

    @property
    def numel(self) -> int:
        return self.held[-1].stop if self.held else 0

    def of(self, slot: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The factors of one parameter on `device`: the array itself if it is there, otherwise copies."""
        return {factor.name: self._view(factor).to(device) for factor in self.held if factor.slot == slot}

    def put(self, slot: int, values: Mapping[str, torch.Tensor]) -> None:
        """Stores the changed values of what `of` gave."""
        for factor in self.held:
            if factor.slot == slot and factor.name in values:
                view = self._view(factor)
                if view.data_ptr() != values[factor.name].data_ptr():
                    view.copy_(values[factor.name])

    def _view(self, factor: Factor) -> torch.Tensor:
        assert self.array is not None
        assert self.array.direct is not None
        return self.array.direct[factor.start : factor.stop].view(factor.shape)
