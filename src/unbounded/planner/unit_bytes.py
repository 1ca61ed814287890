"""What one rank keeps of each unit, the tiers it may be on, and what a plan has already fixed."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unbounded.errors import PlanError
from unbounded.planner.plan import NOWHERE, Placement, Plan

KINDS = ("weights", "gradients", "optimizer")
# In the name of a unit: its dtype and what else tells it from others of its module, or the rows of its tile. Without
# this "layers.1[bfloat16]" would be read as a set of characters, and mean "layers.11" and "layers.16".
_LABEL = re.compile(r"\[((b?float|u?int|complex|bool)\w*(, [^]]*)?|\d+:\d+)\]")


@dataclass(frozen=True)
class UnitBytes:
    """What one rank keeps of one unit, by kind of state."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    remainder: int = 0  # the bits that complete 16-bit weights to their master
    summed_gradients: int = 0  # gradients in the dtype in which they are added up, as the disk keeps them
    deferred: int = 0  # whole gradients that wait for their reduction: on the device, wherever they go afterwards

    owned: int | None = None  # the part of the weights that this rank updates; None: all it keeps
    packed: int = 0  # the weights outside the device if those that are frozen are packed; 0: there are none to pack
    is_packed: bool = False

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """Everything except the name."""
        kinds = (self.weights, self.gradients, self.optimizer, self.remainder)
        return (*kinds, self.summed_gradients, self.deferred, self.owned, self.packed, self.is_packed)

    @property
    def updated_weights(self) -> int:
        return self.weights if self.owned is None else self.owned

    def size(self, kind: str, tier: str, *, is_summed: bool = False) -> int:
        """The bytes of one kind on a tier, without what completes the weights."""
        if tier == NOWHERE:
            return 0
        if kind == "gradients" and (is_summed or tier == "disk"):
            return max(self.gradients, self.summed_gradients)
        if kind == "weights" and self.is_packed and tier != "device":
            return self.packed
        return int(getattr(self, kind))


def may_pack(plan: Plan, *, is_cpu: bool) -> bool:
    """Whether frozen weights outside the device may be packed; unless the plan says so, only where a GPU unpacks."""
    return not is_cpu if plan.pack_frozen is None else plan.pack_frozen


def packings(units: Sequence[UnitBytes], plan: Plan, *, is_cpu: bool) -> list[tuple[bool, bool]]:
    """Whether frozen weights are packed, and whether weights and gradients may go to disk, in the order to try. Unless
    the plan says so, weights are packed before any goes to disk."""
    if not may_pack(plan, is_cpu=is_cpu) or not any(unit.packed for unit in units):
        return [(False, False), (False, True)]
    packed = [(True, False), (True, True)]
    return packed if plan.pack_frozen else [(False, False), *packed]


def pack_unit(unit: UnitBytes, *, packs: bool) -> UnitBytes:
    """The unit as it is if frozen weights outside the device are packed, or not."""
    return replace(unit, is_packed=packs and unit.packed > 0)


@dataclass(frozen=True)
class Budget:
    """What one rank may use of each tier, and the part of it that buffers and activations need.

    If states do not fit next to the reserves, the next pair of `tighter` ones is used.
    """

    device: int
    host: int
    disk: int
    device_reserve: int = 0
    host_reserve: int = 0
    tighter: tuple[tuple[int, int], ...] = ()

    @property
    def rooms(self) -> list[dict[str, int]]:
        """The room for states in each tier, the most comfortable first."""
        reserves = ((self.device_reserve, self.host_reserve), *self.tighter)
        return [
            {"device": self.device - device, "host": self.host - host, "disk": self.disk} for device, host in reserves
        ]


@dataclass(frozen=True)
class UnitPlace:
    weights: str
    gradients: str
    optimizer: str

    @property
    def remainder(self) -> str:
        """With the optimizer states or, if those are on disk, with the weights, which saves a fifth of the traffic."""
        return str(_remainder_tier({"weights": self.weights, "optimizer": self.optimizer}))


def sum_bytes(units: Sequence[UnitBytes], places: Sequence[UnitPlace], tier: str) -> int:
    """What a placement takes of a tier."""
    rows = zip(units, places, strict=True)
    return sum(use_of(unit, {kind: getattr(where, kind) for kind in KINDS})[tier] for unit, where in rows)


def use_of(unit: UnitBytes, tiers: Mapping[str, str]) -> Counter[str]:
    """The bytes that the kinds placed so far take of each tier."""
    use: Counter[str] = Counter(device=0 if tiers.get("gradients") == NOWHERE else unit.deferred)
    for kind, tier in tiers.items():
        use[tier] += unit.size(kind, tier)
    remainder = _remainder_tier(tiers)
    if remainder is not None:
        use[remainder] += unit.remainder
    return use


def _remainder_tier(tiers: Mapping[str, str]) -> str | None:
    """Where the remainder of the weights lives, as far as the placement is known."""
    optimizer = tiers.get("optimizer", "disk")
    return optimizer if optimizer != "disk" else tiers.get("weights")


def fixed_tiers(unit: str, plan: Plan) -> dict[str, str]:
    """The tiers that the plan has fixed for a unit of this name."""
    named = {kind: read_placement(getattr(plan, kind), unit) for kind in KINDS}
    tiers = {kind: tier for kind, tier in named.items() if tier is not None}
    if plan.stage < 3:
        tiers["weights"] = "device"
    if "gradients" not in tiers and "optimizer" in tiers:
        tiers["gradients"] = tiers["optimizer"] if tiers["optimizer"] != "disk" else "host"
    return tiers


def read_placement(placement: Placement | None, unit: str) -> str | None:
    """The tier that `placement` names for `unit`: the first pattern that matches, or None if it is left open."""
    if placement is None or isinstance(placement, str):
        return placement
    return next((tier for pattern, tier in placement if _matches(unit, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    """The parameters of one module may be several units, "layers.0[bfloat16, frozen]" among them. A closed plan names
    those; a pattern for the module is meant for all of them.
    """
    pattern = _LABEL.sub(lambda label: glob.escape(label.group()), pattern)
    module = name.partition("[")[0]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(module, pattern)


def check_patterns(placement: Placement | None, kind: str, names: Sequence[str], noun: str = "unit") -> None:
    """Raises if a pattern matches no unit (or block): a misspelt one would silently place nothing."""
    if placement is None or isinstance(placement, str):
        return
    for pattern, _ in placement:
        if not any(_matches(name, pattern) for name in names):
            known = f"The {noun}s are {', '.join(names[:8])}..." if names else f"The model has no repeated {noun}s."
            raise PlanError(f"the pattern {pattern!r} in {kind} matches no {noun}. {known}")
