"""`.grad` of a managed parameter: the unit's gradient has it, where this rank holds it whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unbounded.errors import StateError
from unbounded.zero.layout import clip_range

if TYPE_CHECKING:
    from unbounded.zero.unit import Unit


def read_grad(unit: Unit, index: int) -> torch.Tensor | None:
    """A parameter's gradient where this rank holds it whole, in the accumulation's own dtype."""
    gradient = unit.gradient
    if not unit.trainable or not unit.used[index]:
        return None
    gradient.wait()
    gradient.forget_squares()  # whoever reads it may change it
    name = unit.layout.slots[index].name
    whole = unit.is_whole and unit.unreduced is None
    if not whole or gradient.consumed or gradient.array is None or gradient.array.direct is None:
        raise StateError(
            f"the gradient of {name!r} is not held whole by this rank (partitioned, kept on {gradient.tier}, or "
            "already used), so .grad cannot give it. Use optimizer.clip_grad_norm_ to clip and "
            "optimizer.zero_grad to clear."
        )
    return unit.slot_views(gradient.array.direct)[index]


def drop_grad(unit: Unit, index: int) -> None:
    """`p.grad = None` for one parameter: what any rank holds of it goes, and the unit's memory with the last one."""
    gradient, slot = unit.gradient, unit.layout.slots[index]
    gradient.wait()
    if gradient.present and gradient.array is not None:
        if gradient.array.direct is None:
            raise StateError(
                f"the gradient of {slot.name!r} is kept on disk and cannot be cleared alone. Use optimizer.zero_grad()."
            )
        gradient.forget_squares()
        if part := clip_range(slot.start, slot.stop, *unit.owned):
            gradient.array.direct[part[0] - unit.owned[0] : part[1] - unit.owned[0]].zero_()
    if unit.unreduced is not None:
        unit.slot_views(unit.unreduced)[index].zero_()
    unit.used[index] = False
    if not any(unit.used):
        gradient.drop()
        unit.unreduced = None
