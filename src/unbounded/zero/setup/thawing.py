"""Trains what was frozen at `shard`: a unit gets its gradient and its optimizer states when it is first unfrozen.

A frozen unit has only weights, whole on every rank below stage 3. If the optimizer had trained it before `shard`, its
states stay with that optimizer until then. Each rank thaws it by itself, since it has the values
it needs, and does not wait for others. What ranks have unfrozen and frozen is compared before their next collective
instead (`describe`, which is part of whatever they announce).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unbounded.errors import StateError
from unbounded.native import kernels
from unbounded.native.disk import ExtentStore
from unbounded.optim import formats
from unbounded.optim.formats import DTYPES
from unbounded.optim.granularity import Granularity
from unbounded.optim.rules import NativeRule, UpdateRule
from unbounded.planner.plan import NOWHERE, Plan
from unbounded.planner.solve import Shortage, solve
from unbounded.planner.step.streaming import carries_weights
from unbounded.planner.unit_bytes import KINDS, Budget, UnitBytes, UnitPlace, use_of
from unbounded.ranks.axis import Axis
from unbounded.tiers.array import Array
from unbounded.zero.gradients.gradient import Gradient
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.layout import counted_ranges
from unbounded.zero.parameters.writes import fetch_owned
from unbounded.zero.setup.blueprint import Blueprint
from unbounded.zero.setup.initial import Installer, carry_over
from unbounded.zero.unit import Unit


class Thawing:
    """Thaws units of one model, inside what is left of its budgets."""

    def __init__(
        self,
        blueprint: Blueprint,
        units: Sequence[Unit],
        ranks: Axis,
        installer: Installer,
        left: MutableMapping[Any, dict[str, Any]],
    ) -> None:
        """`left` are the states that the given optimizer still has: of parameters that were frozen at `shard`."""
        self.tiers = installer.tiers
        self._installer, self._ranks, self._left = installer, ranks, left
        # Not the specs: they hold the model, which holds this.
        self._shapes = {unit: spec.shape() for unit, spec in zip(units, blueprint.specs, strict=True)}
        self._blueprint = replace(blueprint, specs=())
        num_threads = blueprint.plan.host_threads
        self._threads = kernels.Pool(num_threads) if num_threads else None
        self._changed: dict[str, bool] = {}  # parameters that are trained now and were not at `shard`, and vice versa
        self._described = ""

    @property
    def uses_disk(self) -> bool:
        """Whether any state is on disk, or may be by the plan: ranks then share disk failures."""
        tiers = {getattr(where, kind) for where in self._blueprint.places for kind in KINDS}
        return self._blueprint.disk_bytes > 0 or "disk" in tiers

    def connect(self, gradient: Gradient, store: ExtentStore | None = None) -> None:
        """Says where the memory of a gradient comes from."""
        bounce = self._installer.bounce
        allocate = partial(self.tiers.allocate, gradient.tier, bounce=bounce, store=store)
        gradient.store.connect(allocate, bounce, self._threads)

    def thaw(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Gives `unit`, one of `units`, what training needs. If it raises, everything is as it was."""
        plan = self._blueprint.plan
        rule = unit.rule_if_trained
        if rule is not None and rule.granularity is Granularity.TENSOR:
            raise StateError(
                f"the unit {unit.name!r} was frozen at `shard`, so it is not laid out for its "
                "optimizer, which updates whole tensors. Unfreeze it before `shard`, and freeze it afterwards."
            )
        trained = replace(self._shapes[unit], trainable=True, rule=rule)
        sizes = replace(trained.sizes(plan.stage, DTYPES[plan.accumulate_dtype]), weights=0)
        where = self._place(unit, sizes, units)
        is_partitioned = self._ranks.size > 1 and plan.stage > 0
        owned = unit.layout.shard_range(self._ranks.rank) if is_partitioned else unit.owned
        gradient = make_gradient(unit, owned, where.gradients, plan)
        taken = use_of(sizes, {"gradients": where.gradients, "optimizer": where.optimizer, "weights": where.weights})
        disk_bytes = trained.disk_bytes(where, sizes, plan.stage)
        store = self.tiers.extend(host_bytes=taken["host"], disk_bytes=disk_bytes)
        states: dict[str, Array] = {}
        carried = carry_over(unit, rule, lambda parameter: self._left.get(parameter, {}))
        try:
            if rule is not None:
                places = {"optimizer": where.optimizer, "remainder": where.remainder}
                given = _complete(unit, owned, rule) | carried.encode(*owned, rule)
                states = self._installer.make_states(rule, owned[1] - owned[0], places, given, pin=False, store=store)
        except BaseException:
            self.tiers.shrink(host_bytes=taken["host"], store=store)
            raise
        self.connect(gradient, store)
        is_carried = carries_weights(states=where.optimizer, weights=where.weights)
        streamed = unit.device.type == "cuda" and is_carried and isinstance(rule, NativeRule)
        unit.begin_training(gradient, owned, rule, states, streamed=streamed)
        carried.count(unit)
        for parameter in unit.views.parameters:
            self._left.pop(parameter, None)

    def note(self, unit: Unit, index: int, *, is_trained: bool) -> None:
        """A parameter was unfrozen or frozen."""
        name = unit.layout.slots[index].name
        if is_trained == self._shapes[unit].trainable:
            self._changed.pop(name, None)
        else:
            self._changed[name] = is_trained
        self._described = ""

    def describe(self) -> str:
        """Which parameters were unfrozen and frozen since `shard`."""
        if not self._described:
            parts = []
            for text, is_trained in (("unfrozen since shard", True), ("frozen since shard", False)):
                names = sorted(name for name, now in self._changed.items() if now is is_trained)
                parts.append(f"{text}: {', '.join(names) or 'nothing'}")
            self._described = "; ".join(parts)
        return self._described

    def _place(self, unit: Unit, sizes: UnitBytes, units: Sequence[Unit]) -> UnitPlace:
        """The places that the plan says; what it leaves open goes where there is room."""
        self.tiers.make_spare(use_of(sizes, dict.fromkeys(KINDS, "host"))["host"])
        spare, planned = self.tiers.spare_bytes(), self._blueprint.budget
        held = sum(other.gradient.device_bytes for other in units if other.trainable)
        budget = Budget(
            spare["device"] - held,
            spare["host"],
            spare["disk"] if self._ranks.size == 1 or self.uses_disk else 0,
            planned.device_reserve,
            0,
            tuple((device, 0) for device, _ in planned.tighter),
        )
        tier = "device" if unit.resident else unit.weights.tier
        solved = solve([sizes], budget, replace(self._blueprint.asked, weights=tier), self._blueprint.machine)
        if isinstance(solved, Shortage):
            raise solved.error(f"gradients and states of the unit {unit.name!r}, which was frozen at `shard`,")
        return solved.places[0]


def _complete(unit: Unit, owned: tuple[int, int], rule: UpdateRule) -> dict[str, torch.Tensor]:
    """What completes the weights to their masters, if the rule keeps that separately."""
    if not {*formats.MASTER_STATES} & {spec.name for spec in rule.specs}:
        return {}
    values = fetch_owned(unit, owned[0] - unit.owned[0], owned[1] - unit.owned[0])
    arrays = formats.encode_weight(values, unit.dtype, rule)
    return {name: value for name, value in arrays.items() if name != "weight"}


def make_gradient(unit: Unit, owned: tuple[int, int], tier: str, plan: Plan) -> Gradient:
    """The gradient of `unit`, of which this rank keeps the `owned` part; it has no memory yet."""
    sum_dtype = DTYPES[plan.accumulate_dtype]
    is_kept = tier != NOWHERE  # otherwise it is on the device, where it was made, until the update takes it
    store = GradientArray(tier if is_kept else "device", owned[1] - owned[0], wire=unit.dtype, sum_dtype=sum_dtype)
    gradient = Gradient(unit.layout, owned, store, unit.device)
    gradient.is_kept = is_kept
    gradient.counted = counted_ranges(unit.layout, owned)
    return gradient
