"""Which tier each kind of state of each unit lives on: one pure function from sizes and budgets.

Device memory goes first to the weights (each byte there saves two transfers a step), then to the optimizer
states of the first units, which the next forward needs first; the rest goes to the host, and what the host
cannot take to disk. Gradients follow the optimizer states they are for, since that is where they are used.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from unbounded.errors import BudgetError, PlanError
from unbounded.planner.plan import Placement, Plan
from unbounded.planner.sizes import format_bytes

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class UnitBytes:
    """What one rank keeps of one unit, by kind of state."""

    name: str
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Budget:
    """What one rank may use of each tier, and the part of it that buffers and activations need."""

    device: int
    host: int
    disk: int
    device_reserve: int = 0
    host_reserve: int = 0


@dataclass(frozen=True)
class UnitPlace:
    weights: str
    gradients: str
    optimizer: str


def place(units: Sequence[UnitBytes], budget: Budget, plan: Plan) -> tuple[UnitPlace, ...]:
    """The tier of every kind of state of every unit. What `plan` fixes stays; raises BudgetError if it cannot fit."""
    room = {
        "device": budget.device - budget.device_reserve,
        "host": budget.host - budget.host_reserve,
        "disk": budget.disk,
    }
    weights = [_place_weights(unit, plan, room) for unit in units]
    pairs = [_place_optimizer(unit, plan, room) for unit in units]
    _check(units, room, budget)
    return tuple(UnitPlace(weight, *pair) for weight, pair in zip(weights, pairs, strict=True))


def _place_weights(unit: UnitBytes, plan: Plan, room: dict[str, int]) -> str:
    fixed = read_placement(plan.weights, unit.name) or ("device" if plan.stage < 3 else None)
    tier = fixed or _first_with_room(unit.weights, room)
    room[tier] -= unit.weights
    return tier


def _place_optimizer(unit: UnitBytes, plan: Plan, room: dict[str, int]) -> tuple[str, str]:
    """The tiers of a unit's gradients and of its optimizer states, which share a tier where that has the room."""
    gradients, optimizer = read_placement(plan.gradients, unit.name), read_placement(plan.optimizer, unit.name)
    if gradients is not None:
        room[gradients] -= unit.gradients
    if optimizer is None:
        together = unit.optimizer + (unit.gradients if gradients is None else 0)
        optimizer = _first_with_room(together, {**room, "disk": 0})
    room[optimizer] -= unit.optimizer
    if gradients is None:
        gradients = optimizer if optimizer != "disk" else _first_with_room(unit.gradients, {**room, "device": 0})
        room[gradients] -= unit.gradients
    return gradients, optimizer


def _first_with_room(num_bytes: int, room: dict[str, int]) -> str:
    return next((tier for tier in TIERS if room[tier] >= num_bytes), "disk")


def read_placement(placement: Placement | None, unit: str) -> str | None:
    """The tier that `placement` names for `unit`: the first pattern that matches, or None where it is left open."""
    if placement is None or isinstance(placement, str):
        return placement
    return next((tier for pattern, tier in placement if fnmatch.fnmatchcase(unit, pattern)), None)


def check_patterns(placement: Placement | None, kind: str, names: Sequence[str]) -> None:
    """Raises where a pattern matches no unit: a misspelt one would silently place nothing."""
    if placement is None or isinstance(placement, str):
        return
    for pattern, _ in placement:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"the pattern {pattern!r} in {kind} matches no unit. The units are {', '.join(names[:8])}..."
            )


def _check(units: Sequence[UnitBytes], room: dict[str, int], budget: Budget) -> None:
    short = {tier: -left for tier, left in room.items() if left < 0}
    if not short:
        return
    total = sum(unit.weights + unit.gradients + unit.optimizer for unit in units)
    facts = ", ".join(
        f"{tier} is short by {format_bytes(missing)} of its {format_bytes(getattr(budget, tier))}"
        for tier, missing in short.items()
    )
    spare = sum(left for left in room.values() if left > 0)
    missing = sum(short.values())
    if spare >= missing:
        remedy = 'The other tiers have the room: leave the placement to plan="auto", or place fewer units there.'
    else:
        remedy = (
            f"Raise a budget by {format_bytes(missing - spare)} (disk_bytes with disk_path on a larger disk is the "
            'cheapest), use more ranks, or optimizer_format="compact".'
        )
    raise BudgetError(f"the states take {format_bytes(total)} on this rank and do not fit: {facts}. {remedy}")
