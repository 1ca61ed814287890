"""What `state_dict()` hands out: copies in host memory, which the engine still knows.

A plain model's state dict aliases its weights, so writing to it changes the model. A copy cannot do that. Writes to a
copy are therefore noticed before the model is next used, and kept if the weights are still those that it shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from unbounded.errors import StateError
from unbounded.zero.unit import Unit


@dataclass(frozen=True)
class _HeldCopy:
    tensor: TensorWeakRef
    version: int
    unit: Unit
    index: int
    generation: int


class StateDictCopies:
    """The copies that somebody still holds."""

    def __init__(self) -> None:
        self._taken: list[_HeldCopy] = []

    def take(self, unit: Unit, index: int, value: torch.Tensor) -> torch.Tensor:
        copy = value.detach().to("cpu", copy=True)
        self._taken.append(_HeldCopy(TensorWeakRef(copy), copy._version, unit, index, unit.generation))
        return copy

    def settle(self) -> None:
        """The model is about to be used: keeps what was written to copies, and forgets those that are gone."""
        alive = []
        for taken in self._taken:
            tensor = taken.tensor()
            if tensor is None:
                continue
            if tensor._version != taken.version:
                self._keep(taken, tensor)
            else:
                alive.append(taken)
        self._taken = alive

    def _keep(self, taken: _HeldCopy, tensor: torch.Tensor) -> None:
        unit, name = taken.unit, taken.unit.layout.slots[taken.index].name
        if unit.generation != taken.generation or not unit.is_whole:
            self._taken.clear()
            why = "from before the last step" if unit.is_whole else "of a partitioned parameter"
            raise StateError(
                f"the value of {name!r} that state_dict() gave was changed in place, but it is a copy {why}, so the "
                "change would be lost. Clone a state dict before changing it, or write inside "
                "`with unbounded.full_params(model):`."
            )
        unit.engine.lending.keep(unit, taken.index, tensor.to(unit.device))
