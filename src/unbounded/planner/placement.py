"""Which tier each kind of state of each unit lives on: one pure function from sizes and budgets.

The first units live whole on the device: their update needs no transfer, and the next forward needs them first.
Moving a unit's optimizer states there relieves the host of 26 bytes of memory traffic a parameter and step, its
weights alone only of 4: so units are filled whole, not kind by kind. Of the others the host takes first what is
light and used often (weights, what completes them, gradients), then optimizer states as far as they go; the rest
of those is read and written once a step, and goes to disk.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unbounded.errors import BudgetError, PlanError
from unbounded.planner.plan import Placement, Plan
from unbounded.planner.sizes import format_bytes

KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class UnitBytes:
    """What one rank keeps of one unit, by kind of state."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    completion: int = 0  # the bits that complete 16-bit weights to their master
    summed_gradients: int = 0  # gradients in the dtype they are added up in, as the disk keeps them
    deferred: int = 0  # whole gradients that wait for their reduction, on the device wherever they go then

    def size(self, kind: str, tier: str) -> int:
        """The bytes of one kind on a tier, without what completes the weights."""
        if kind == "gradients" and tier == "disk":
            return max(self.gradients, self.summed_gradients)
        return int(getattr(self, kind))


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

    @property
    def completion(self) -> str:
        """With the optimizer states; where those are on disk, with the weights, which saves a fifth of the traffic."""
        return str(_completion_tier({"weights": self.weights, "optimizer": self.optimizer}))


def place(units: Sequence[UnitBytes], budget: Budget, plan: Plan) -> tuple[UnitPlace, ...]:
    """The tier of every kind of state of every unit. What `plan` fixes stays; raises BudgetError if it cannot fit."""
    room = {
        "device": budget.device - budget.device_reserve,
        "host": budget.host - budget.host_reserve,
        "disk": budget.disk,
    }
    tiers = [_fixed_tiers(unit, plan) for unit in units]
    for unit, fixed in zip(units, tiers, strict=True):
        for tier, taken in _use(unit, fixed).items():
            room[tier] -= taken
    _fill(units, tiers, KINDS, "device", room)
    _fill(units, tiers, ("weights", "gradients"), "host", room)
    _fill(units, tiers, ("optimizer",), "host", room)
    _fill(units, tiers, KINDS, "disk", room)
    _check(units, room, budget)
    return tuple(UnitPlace(**fixed) for fixed in tiers)


def sum_bytes(units: Sequence[UnitBytes], places: Sequence[UnitPlace], tier: str) -> int:
    """What a placement takes of a tier."""
    rows = zip(units, places, strict=True)
    return sum(_use(unit, {kind: getattr(where, kind) for kind in KINDS})[tier] for unit, where in rows)


def _fill(
    units: Sequence[UnitBytes], tiers: list[dict[str, str]], kinds: Sequence[str], tier: str, room: dict[str, int]
) -> None:
    """Puts the open ones of `kinds` of each unit in turn on `tier`, where it can take them together; disk must."""
    for unit, fixed in zip(units, tiers, strict=True):
        chosen = fixed | {kind: tier for kind in kinds if kind not in fixed}
        before, after = _use(unit, fixed), _use(unit, chosen)
        left = {name: room[name] + before[name] - after[name] for name in room}
        if tier == "disk" or all(left[name] >= 0 for name in room if after[name] > before[name]):
            fixed.update(chosen)
            room.update(left)


def _use(unit: UnitBytes, tiers: Mapping[str, str]) -> Counter[str]:
    """The bytes that the kinds placed so far take of each tier."""
    use: Counter[str] = Counter(device=unit.deferred)
    for kind, tier in tiers.items():
        use[tier] += unit.size(kind, tier)
    completion = _completion_tier(tiers)
    if completion is not None:
        use[completion] += unit.completion
    return use


def _completion_tier(tiers: Mapping[str, str]) -> str | None:
    """Where what completes the weights lives, as far as the placement is known."""
    optimizer = tiers.get("optimizer", "disk")
    return optimizer if optimizer != "disk" else tiers.get("weights")


def _fixed_tiers(unit: UnitBytes, plan: Plan) -> dict[str, str]:
    """What the plan leaves no choice about."""
    named = {kind: read_placement(getattr(plan, kind), unit.name) for kind in KINDS}
    tiers = {kind: tier for kind, tier in named.items() if tier is not None}
    if plan.stage < 3:
        tiers["weights"] = "device"
    if "gradients" not in tiers and "optimizer" in tiers:
        tiers["gradients"] = tiers["optimizer"] if tiers["optimizer"] != "disk" else "host"
    return tiers


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
    total = sum(sum(_use(unit, dict.fromkeys(KINDS, "device")).values()) for unit in units)
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
