"""What will be built, before anything is: the units of a model with their sizes and places.

Nothing here allocates. A `Blueprint` comes from the module tree, the optimizer's rules and the budgets; `assembly`
makes it real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from unbounded.errors import BudgetError, PlanError
from unbounded.optim.book import RuleBook
from unbounded.optim.granularity import Granularity
from unbounded.optim.rules import NativeRule, UpdateRule
from unbounded.planner.machine import MachineRates
from unbounded.planner.plan import Plan
from unbounded.planner.sizes import format_bytes
from unbounded.planner.solve import Shortage, solve
from unbounded.planner.step.streaming import carries_weights, choose_streamed, streamed_part
from unbounded.planner.unit_bytes import (
    KINDS,
    Budget,
    UnitBytes,
    UnitPlace,
    check_patterns,
    fixed_tiers,
    sum_bytes,
    use_of,
)
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut
from unbounded.tiers import budget as budgets
from unbounded.tiers.tiers import disk_size
from unbounded.zero.factors import find_factors
from unbounded.zero.layout import ALIGN, WHOLE_ALIGN, Layout, deal_slots, lay_out
from unbounded.zero.sites import Member, Site, split_members

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Of the device, for an element of the largest parameter whose update sees it whole: itself, its gradient, its states
# and those of its neighbours on their way in and out, and what the update computes with.
WHOLE_BYTES = 48


@dataclass(eq=False, kw_only=True)
class UnitShape:
    """What determines the bytes of a unit."""

    name: str
    dtype: torch.dtype
    trainable: bool
    layout: Layout
    rule: UpdateRule | None = None
    rule_if_trained: UpdateRule | None = None  # also of what is frozen, and may be trained later
    homes: tuple[int, ...] = ()

    @property
    def needs_wholes(self) -> bool:
        return self.rule is not None and self.rule.granularity is Granularity.TENSOR

    def factor_bytes(self, stage: int) -> int:
        """What the rank with most of them keeps of states in other shapes than the parameters'."""
        ranks = [None] if stage == 0 else range(self.layout.num_shards)
        held = [find_factors(self.layout, self.rule, self.homes, rank) for rank in ranks]
        return max((factors[-1].stop * 4 for factors in held if factors), default=0)

    def owned_numel(self, stage: int) -> int:
        return self.layout.numel if stage == 0 else self.layout.shard_numel

    def sizes(self, stage: int, sum_dtype: torch.dtype) -> UnitBytes:
        owned = self.owned_numel(stage)
        weights = (self.layout.shard_numel if stage == 3 else self.layout.numel) * self.dtype.itemsize
        if self.rule is None:
            return UnitBytes(self.name, weights, 0, 0)
        states = {spec.name: spec.numel(owned) * spec.dtype.itemsize for spec in self.rule.specs}
        remainder = states.pop("remainder", 0)
        summed = owned * max(sum_dtype.itemsize, self.dtype.itemsize)
        deferred = self.layout.numel * self.dtype.itemsize if stage == 1 and owned < self.layout.numel else 0
        return UnitBytes(
            self.name,
            weights,
            owned * self.dtype.itemsize,
            sum(states.values()) + self.factor_bytes(stage),
            remainder=remainder,
            summed_gradients=summed,
            deferred=deferred,
            owned=owned * self.dtype.itemsize,
        )

    def disk_bytes(self, where: UnitPlace, sizes: UnitBytes, stage: int) -> int:
        """What the unit takes of the disk store, each array rounded up as the store does."""
        owned, arrays = self.owned_numel(stage), []
        if where.weights == "disk" and sizes.weights:
            arrays.append(sizes.weights)
        if self.rule is not None:
            for spec in self.rule.specs:
                if (where.remainder if spec.name == "remainder" else where.optimizer) == "disk":
                    arrays.append(spec.numel(owned) * spec.dtype.itemsize)
            if where.gradients == "disk":
                arrays.append(sizes.size("gradients", "disk"))
        return sum(disk_size(num_bytes) for num_bytes in arrays)


@dataclass(eq=False, kw_only=True)
class UnitSpec(UnitShape):
    """One unit before it runs, with its modules and parameters."""

    site: Site
    members: list[Member]

    def shape(self) -> UnitShape:
        """The same, for whoever must not keep the model."""
        return UnitShape(name=self.name, dtype=self.dtype, trainable=self.trainable, layout=self.layout, rule=self.rule)


@dataclass(frozen=True)
class Blueprint:
    """The units, where each lives, the plan with every field closed, and what to allocate for them."""

    specs: tuple[UnitSpec, ...]
    places: tuple[UnitPlace, ...]
    streamed: tuple[bool, ...]  # which host states the GPU updates
    early: tuple[bool, ...]  # which host states are updated inside the backward, beside the old ones
    plan: Plan
    disk_bytes: int
    host_bytes: int
    buffers: budgets.LeasedBuffers
    asked: Plan  # with what was left open
    budget: Budget
    machine: MachineRates


@dataclass(frozen=True)
class Holdings:
    """What a rank holds of parameters that other axes cut or repeat, by the parameter's id."""

    cuts: Mapping[int, Cut] = field(default_factory=dict)
    uncounted: frozenset[int] = frozenset()  # another rank counts them in sums over the whole model


def find_specs(
    sites: Sequence[Site],
    groups: Mapping[int, int],
    num_shards: int,
    lowered: torch.dtype | None,
    holdings: Holdings | None = None,
    book: RuleBook | None = None,
) -> list[UnitSpec]:
    """The units of the sites, in order; `lowered` is the dtype that the plan asks of float parameters.

    With `book` they have their rules. Parameters of different optimizers are different units.
    """
    held = holdings or Holdings()
    found: list[UnitSpec] = []
    for site in sites:
        kinds = list(split_members(site, lambda member: _optimizer_of(member, groups, book)))
        for kind in kinds:
            spec = _spec(site, kind, groups, num_shards, lowered, held, book, is_only=len(kinds) == 1)
            spec.homes = deal_slots(spec.layout, len(found))
            found.append(spec)
    return found


def _optimizer_of(member: Member, groups: Mapping[int, int], book: RuleBook | None) -> int:
    return -1 if book is None else book.member_of(_group_of(member, groups))


def _group_of(member: Member, groups: Mapping[int, int]) -> int:
    return groups.get(id(member.parameter if member.whole is None else member.whole), -1)


def _spec(
    site: Site,
    kind: tuple[torch.dtype, bool, int, list[Member]],
    groups: Mapping[int, int],
    num_shards: int,
    lowered: torch.dtype | None,
    held: Holdings,
    book: RuleBook | None,
    *,
    is_only: bool,
) -> UnitSpec:
    dtype, trainable, optimizer, members = kind
    entries = [(m.names[0], tuple(m.parameter.shape), _group_of(m, groups)) for m in members]
    name = site.name or "root"
    if not is_only:
        labels = [str(dtype).removeprefix("torch."), *([] if trainable else ["frozen"])]
        if book is not None and book.num_members > 1 and optimizer >= 0:
            labels.append(book.kind(optimizer))
        name += f"[{', '.join(labels)}]"
    target = lowered if lowered is not None and dtype.is_floating_point else dtype
    cuts = {m.names[0]: held.cuts[id(m.parameter)] for m in members if id(m.parameter) in held.cuts}
    uncounted = frozenset(m.names[0] for m in members if id(m.parameter) in held.uncounted)
    rule = None
    if book is not None:
        with contextlib.nullcontext() if trainable else contextlib.suppress(PlanError):
            rule = book.rule(optimizer, target, [shape for _, shape, _ in entries])
    needs_wholes = trainable and rule is not None and rule.granularity is Granularity.TENSOR
    if needs_wholes:
        _refuse_parts(members, cuts, book.kind(optimizer) if book is not None else "")
    laid = lay_out(entries, num_shards, cuts, uncounted, WHOLE_ALIGN if needs_wholes else ALIGN)
    return UnitSpec(
        name=name,
        dtype=target,
        trainable=trainable,
        layout=_with_wholes(laid, members),
        rule=rule if trainable else None,
        rule_if_trained=rule,
        site=site,
        members=members,
    )


def _refuse_parts(members: Sequence[Member], cuts: Mapping[str, Cut], kind: str) -> None:
    """Raises where no rank of the data axis has a parameter whole."""
    for member in members:
        name = member.names[0]
        if name in cuts or member.whole is not None:
            how = "cuts it over the tensor axis" if name in cuts else "runs it in tiles"
            remedy = "Use tensor=1" if name in cuts else "Use more device memory instead of tiles"
            raise PlanError(
                f"{kind} needs the parameter {name!r} whole for its update, but the plan {how}. {remedy}, or give "
                "this parameter to an elementwise optimizer such as AdamW: shard(model, [one, other])."
            )


def _with_wholes(layout: Layout, members: Sequence[Member]) -> Layout:
    """The layout with what tiles are tiles of."""
    wholes = {m.names[0]: (m.first, tuple(m.whole.shape)) for m in members if m.whole is not None}
    slots = (
        replace(slot, first=wholes[slot.name][0], whole=wholes[slot.name][1]) if slot.name in wholes else slot
        for slot in layout.slots
    )
    return replace(layout, slots=tuple(slots))


def plan_units(
    specs: Sequence[UnitSpec], plan: Plan, ranks: Axis, device: torch.device, *, world_size: int
) -> Blueprint:
    """All ranks of the axis must call this. Places the units within what the poorest rank has.

    `world_size` counts the ranks of all axes: those of one machine share its memory, its disk and its cores.
    """
    _check(specs, plan, ranks.size)
    sizes = [spec.sizes(plan.stage, DTYPES[plan.accumulate_dtype]) for spec in specs]
    ring = (plan.prefetch_units + 2) * max((spec.layout.numel * spec.dtype.itemsize for spec in specs), default=0)
    own = budgets.measure(plan, device, budgets.local_size(world_size))
    everyone = ranks.objects((own, budgets.this_machine(plan, device, world_size)))
    on_device, host, disk = (min(column) for column in zip(*(sizes for sizes, _ in everyone), strict=True))
    machine = everyone[0][1]  # so that all ranks decide alike
    arrays = 2 + max((len(spec.rule_if_trained.specs) for spec in specs if spec.rule_if_trained is not None), default=0)
    buffers = budgets.size_buffers(host, arrays)
    largest = max((slot.numel for spec in specs if spec.needs_wholes for slot in spec.layout.slots), default=0)
    wholes = largest * WHOLE_BYTES if device.type == "cuda" else 0
    may_store = sum(use_of(unit, dict.fromkeys(KINDS, "disk") | fixed_tiers(unit, plan))["disk"] for unit in sizes)
    budget = budgets.set_aside(
        (on_device, host, disk), plan, device, ring=ring, buffers=buffers, wholes=wholes, may_store=may_store
    )
    solved = solve(sizes, budget, plan, machine)
    if isinstance(solved, Shortage):
        raise solved.error()
    places = solved.places
    _check_gathered(specs, places, plan, on_device)
    ranks.check_same(repr(places), "placement")
    named = {
        kind: tuple((spec.name, getattr(where, kind)) for spec, where in zip(specs, places, strict=True))
        for kind in ("weights", "gradients", "optimizer")
    }
    threads = budgets.host_threads(plan, world_size)
    given = plan.device_bytes if plan.device_bytes is not None else on_device
    closed = replace(plan, device_bytes=given, host_bytes=host, disk_bytes=disk, host_threads=threads, **named)  # type: ignore[arg-type]
    rows = zip(specs, places, sizes, strict=True)
    disk_bytes = sum(spec.disk_bytes(where, unit_bytes, plan.stage) for spec, where, unit_bytes in rows)
    host_bytes = sum_bytes(sizes, places, "host") + buffers.num_bytes
    if disk_bytes and host_bytes > host:
        raise BudgetError(
            f"host_bytes is {format_bytes(host)}, but with states on disk the buffers take "
            f"{format_bytes(buffers.num_bytes)} of it and states that the plan puts there "
            f"{format_bytes(host_bytes - buffers.num_bytes)}. Raise host_bytes to {format_bytes(host_bytes)}."
        )
    streamed = _stream(specs, places, machine, carries=plan.move_states and device.type == "cuda")
    early = _choose_early(specs, sizes, places, streamed, plan.early_units, solved.room["host"])
    host_bytes += sum(_drafted(unit_bytes) for unit_bytes, chosen in zip(sizes, early, strict=True) if chosen)
    closed = replace(closed, early_units=sum(early))
    return Blueprint(
        tuple(specs), places, streamed, early, closed, disk_bytes, host_bytes, buffers, plan, budget, machine
    )


def _drafted(unit: UnitBytes) -> int:
    """What a second set of a unit's weights and states takes."""
    return unit.updated_weights + unit.optimizer + unit.remainder


def _choose_early(
    specs: Sequence[UnitSpec],
    sizes: Sequence[UnitBytes],
    places: Sequence[UnitPlace],
    streamed: Sequence[bool],
    wanted: int,
    host_room: int,
) -> tuple[bool, ...]:
    """Which units have room on the host for a second set of states: the last ones, whose gradients come first.

    Room to add up the gradients of several backwards is left.
    """
    rows = list(zip(sizes, places, strict=True))
    spare = host_room - sum_bytes(sizes, places, "host")
    spare -= sum(unit.summed_gradients - unit.gradients for unit, where in rows if where.gradients == "host")
    chosen = [False] * len(specs)
    for index in reversed(range(len(specs))):
        unit, where = rows[index]
        is_on_host = (where.weights, where.gradients, where.optimizer) == ("host",) * 3
        if not is_on_host or streamed[index] or not isinstance(specs[index].rule, NativeRule):
            continue
        if sum(chosen) < wanted and _drafted(unit) <= spare:
            chosen[index] = True
            spare -= _drafted(unit)
    return tuple(chosen)


def _stream(
    specs: Sequence[UnitSpec], places: Sequence[UnitPlace], machine: MachineRates, *, carries: bool
) -> tuple[bool, ...]:
    """Which units the GPU updates on their way through it: some of those with states on the host, those that are
    updated as whole tensors, and where a lane `carries` them those whose weights alone are not on the GPU.
    """
    rows = list(zip(specs, places, strict=True))
    wholes = [spec.needs_wholes and where.optimizer == "host" for spec, where in rows]
    if not all(isinstance(spec.rule, NativeRule) or spec.needs_wholes for spec in specs if spec.rule is not None):
        return tuple(wholes)
    candidates = [where.optimizer == "host" and not spec.needs_wholes for spec, where in rows]
    chosen = choose_streamed(candidates, streamed_part(machine))
    return tuple(
        streams or whole or (carries and carries_weights(states=where.optimizer, weights=where.weights))
        for streams, whole, where in zip(chosen, wholes, places, strict=True)
    )


def _check(specs: Sequence[UnitSpec], plan: Plan, num_ranks: int) -> None:
    if plan.stage < 3 and num_ranks > 1 and plan.weights not in (None, "device"):
        raise PlanError(
            f"stage {plan.stage} keeps whole weights on every device, but the plan puts them on {plan.weights!r}. "
            "Use stage 3 to keep weights elsewhere."
        )
    if not plan.keeps_gradients:
        if any(spec.trainable and spec.rule is None for spec in specs):
            raise PlanError(
                'the plan says gradients="none", so units are updated inside the backward, but `shard` was given no '
                'optimizer. Give it one, or use gradients="host" or "device".'
            )
        for member in (member for spec in specs for member in spec.members):
            if member.parameter.grad is not None:
                raise PlanError(
                    f'the parameter {member.names[0]!r} has a gradient already, but the plan says gradients="none". '
                    "Call optimizer.zero_grad() before `shard`."
                )
    names = [spec.name for spec in specs]
    for kind in ("weights", "gradients", "optimizer"):
        check_patterns(getattr(plan, kind), kind, names)


def _check_gathered(specs: Sequence[UnitSpec], places: Sequence[UnitPlace], plan: Plan, device_bytes: int) -> None:
    """Raises unless the device has room for each unit, whole, while it runs."""
    rows = [
        (spec.layout.numel * spec.dtype.itemsize, spec.name)
        for spec, where in zip(specs, places, strict=True)
        if where.weights != "device"
    ]
    largest, name = max(rows, default=(0, ""))
    if plan.device_bytes is not None and largest > device_bytes:
        raise BudgetError(
            f"device_bytes leaves {format_bytes(device_bytes)} for the model, but the unit {name!r} takes "
            f"{format_bytes(largest)} of the device while it runs. Raise device_bytes, or split the unit's layers with "
            "`unbounded.tile(model, max_bytes=...)` before `shard`."
        )
