"""What `state_dict()` hands out: copies in host memory, which the engine still knows.

A plain model's state dict aliases its weights, so writing to it changes the model. A copy cannot do that. Writes to a
copy are therefore noticed before the model is next used, and kept if the weights are still those that it shows. A copy
that nobody holds any more is freed at once, unless it was written to: `model.state_dict()[name].copy_(value)`.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch

from unbounded.errors import StateError
from unbounded.zero.unit import Unit


class _HeldCopy:
    """A copy of one parameter. `alias` is over the same memory and has the same version counter."""

    def __init__(self, copy: torch.Tensor, index: int, generation: int) -> None:
        self.alias: torch.Tensor | None = copy.detach()
        self.index, self.generation, self.version = index, generation, copy._version
        # By itself: when the process ends, the names of this module are gone before the last copies.
        self._copy = weakref.ref(copy, partial(_let_go, weakref.ref(self)))

    def is_held(self) -> bool:
        return self._copy() is not None

    def is_written(self) -> bool:
        """Whether somebody has written to it since the version that is known."""
        alias = self.alias
        return alias is not None and alias._version != self.version

    def note(self) -> None:
        """What was written until now is known."""
        if self.alias is not None:
            self.version = self.alias._version


def _let_go(held: weakref.ref[_HeldCopy], _: weakref.ref[torch.Tensor]) -> None:
    own = held()
    if own is not None and not own.is_written():
        own.alias = None


class StateDictCopies:
    """The copies that somebody still holds or that were written to, by unit."""

    def __init__(self) -> None:
        self._taken: dict[Unit, list[_HeldCopy]] = {}

    def take(self, unit: Unit, index: int, value: torch.Tensor) -> torch.Tensor:
        copy = value.detach().to("cpu", copy=True)
        self._taken.setdefault(unit, []).append(_HeldCopy(copy, index, unit.generation))
        return copy

    def settle(self) -> None:
        """The model is about to be used: keeps what was written to copies, and forgets those that are gone."""
        for unit in list(self._taken):
            self.settle_unit(unit)

    def settle_unit(self, unit: Unit) -> None:
        """The same, for the weights of one unit."""
        taken = self._taken.get(unit)
        if taken is None:
            return
        # A state dict comes here for each parameter, with the copies of all before it: no more is done for those.
        if len(taken) <= 2 * len(unit.layout.slots) and not any(held.is_written() for held in taken):
            return
        alive = [held for held in self._taken.pop(unit) if held.alias is not None]
        written = {held.index: held for held in alive if held.is_written()}
        for held in written.values():
            self._refuse_lost(unit, held)
        before = unit.generation
        for index, held in written.items():
            unit.engine.lending.keep(unit, index, held.alias.to(unit.device))  # type: ignore[union-attr]
            held.note()
        for held in alive:
            if held.generation == before and written.get(held.index, held) is held:
                held.generation = unit.generation  # the rest of the unit has not changed
        if left := [held for held in alive if held.is_held()]:
            self._taken[unit] = left

    def replace(self, unit: Unit, index: int) -> None:
        """The parameter gets another value, so what was written to copies of the old one until now is not needed."""
        for held in self._taken.get(unit, ()):
            if held.index == index:
                held.note()

    def _refuse_lost(self, unit: Unit, held: _HeldCopy) -> None:
        """Raises for a write that cannot be kept."""
        if unit.generation != held.generation or not unit.is_whole:
            self._taken.clear()
            why = "from before the last step" if unit.is_whole else "of a partitioned parameter"
            raise StateError(
                f"the value of {unit.layout.slots[held.index].name!r} that state_dict() gave was changed in place, but "
                f"it is a copy {why}, so the change would be lost. Clone a state dict before changing it, give it to "
                "load_state_dict, or write inside `with unbounded.full_params(model):`."
            )
