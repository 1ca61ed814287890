"""What will be built, before anything is built: where the units of a model live, within what its ranks have.

`plan_units` measures and agrees; `draw`, a pure function, decides: from the units (`specs`), the plan and what every
rank has. Nothing here allocates: `assembly` carries a `Blueprint` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unbounded.errors import BudgetError, PlanError
from unbounded.optim.formats import DTYPES
from unbounded.optim.rules import NativeRule
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.packed_size import unpacking_bytes
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
    pack_unit,
    sum_bytes,
    use_of,
)
from unbounded.ranks.axis import Axis
from unbounded.tiers import budget as budgets
from unbounded.zero.setup.draft_choice import choose_drafts, drafted_bytes
from unbounded.zero.setup.specs import UnitSpec
from unbounded.zero.step.early.in_backward import InBackward

# Device memory for each element of the largest parameter whose update sees it whole: itself, its gradient, its states,
# those of its neighbours being moved in and out, and what the update computes with.
WHOLE_BYTES = 48
# The part of the host's spare memory that updates inside the backward take by themselves. Saves copy into the rest.
EARLY_PART = 3 / 4


@dataclass(frozen=True)
class Blueprint:
    """The units, where each lives, the plan with every field closed, and what to allocate for them."""

    specs: tuple[UnitSpec, ...]
    places: tuple[UnitPlace, ...]
    packed: tuple[bool, ...]  # which have their weights packed
    streamed: tuple[bool, ...]  # which host states the GPU updates
    early: tuple[InBackward, ...]  # what of the units on the host is written to other arrays inside the backward
    plan: Plan
    disk_bytes: int
    host_bytes: int
    buffers: budgets.LeasedBuffers
    asked: Plan  # as it was given, with open fields
    budget: Budget
    machine: MachineRates


@dataclass(frozen=True)
class Means:
    """What every rank of the axis has at least, for the states and everything that runs at the same time."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    machine: MachineRates  # the first rank's, so that all ranks decide alike
    host_threads: int  # this rank's own


def plan_units(
    specs: Sequence[UnitSpec], plan: Plan, ranks: Axis, device: torch.device, *, world_size: int
) -> Blueprint:
    """All ranks of the axis must call this. Places the units within what the rank with the least has.

    `world_size` counts the ranks of all axes: those of one machine share its memory, its disk and its cores.
    """
    _check(specs, plan)
    own = budgets.measure(plan, device, budgets.local_size(world_size))
    everyone = ranks.objects((own, budgets.this_machine(plan, device, world_size)))
    on_device, host, disk = (min(column) for column in zip(*(sizes for sizes, _ in everyone), strict=True))
    means = Means(on_device, host, disk, everyone[0][1], budgets.host_threads(plan, world_size))
    drawn = draw(specs, plan, means, device.type)
    ranks.check_same(repr(drawn.places), "placement")
    return drawn


def draw(specs: Sequence[UnitSpec], plan: Plan, means: Means, device_type: str) -> Blueprint:
    """Decides everything that is open, only from these values."""
    sizes = [spec.sizes(plan.stage, DTYPES[plan.accumulate_dtype]) for spec in specs]
    arrays = 2 + max((len(spec.rule_if_trained.specs) for spec in specs if spec.rule_if_trained is not None), default=0)
    buffers = budgets.size_buffers(means.host_bytes, arrays)
    budget = _set_aside(specs, sizes, plan, means, buffers, device_type)
    solved = solve(sizes, budget, plan, means.machine)
    if isinstance(solved, Shortage):
        raise solved.error()
    places = solved.places
    sizes = [
        pack_unit(unit, packs=solved.packs and where.weights != "device")
        for unit, where in zip(sizes, places, strict=True)
    ]
    _check_gathered(specs, places, plan, means.device_bytes)
    rows = zip(specs, places, sizes, strict=True)
    disk_bytes = sum(spec.disk_bytes(where, unit_bytes, plan.stage) for spec, where, unit_bytes in rows)
    host_bytes = sum_bytes(sizes, places, "host") + buffers.num_bytes
    if disk_bytes and host_bytes > means.host_bytes:
        raise BudgetError(
            f"host_bytes is {format_bytes(means.host_bytes)}, but with states on disk the buffers take "
            f"{format_bytes(buffers.num_bytes)} of it, and states that the plan puts there take "
            f"{format_bytes(host_bytes - buffers.num_bytes)}. Raise host_bytes to {format_bytes(host_bytes)}."
        )
    streamed = _stream(specs, places, means.machine, carries=plan.lets_states_move and device_type == "cuda")
    early = _choose_early(specs, sizes, places, streamed, _early_limits(plan, device_type), solved.room["host"])
    host_bytes += sum(drafted_bytes(unit_bytes, drafted) for unit_bytes, drafted in zip(sizes, early, strict=True))
    closed = _close(plan, specs, places, means, early)
    if any(unit.packed for unit in sizes):
        closed = replace(closed, pack_frozen=solved.packs)
    packed = tuple(unit.is_packed for unit in sizes)
    return Blueprint(
        tuple(specs),
        places,
        packed,
        streamed,
        early,
        closed,
        disk_bytes,
        host_bytes,
        buffers,
        plan,
        budget,
        means.machine,
    )


def _set_aside(
    specs: Sequence[UnitSpec],
    sizes: Sequence[UnitBytes],
    plan: Plan,
    means: Means,
    buffers: budgets.LeasedBuffers,
    device_type: str,
) -> Budget:
    ring = (plan.prefetch_units + 2) * max((spec.layout.numel * spec.dtype.itemsize for spec in specs), default=0)
    if device_type == "cuda" and plan.pack_frozen is not False:
        ring += max((unpacking_bytes(unit.weights // 2) for unit in sizes if unit.packed), default=0)
    largest = max((slot.numel for spec in specs if spec.needs_wholes for slot in spec.layout.slots), default=0)
    wholes = largest * WHOLE_BYTES if device_type == "cuda" else 0
    may_store = sum(use_of(unit, dict.fromkeys(KINDS, "disk") | fixed_tiers(unit.name, plan))["disk"] for unit in sizes)
    room = (means.device_bytes, means.host_bytes, means.disk_bytes)
    return budgets.set_aside(
        room, plan, torch.device(device_type), ring=ring, buffers=buffers, wholes=wholes, may_store=may_store
    )


def _close(
    plan: Plan, specs: Sequence[UnitSpec], places: Sequence[UnitPlace], means: Means, early: Sequence[InBackward]
) -> Plan:
    """The plan with its open fields filled by what was decided."""
    named = {
        kind: tuple((spec.name, getattr(where, kind)) for spec, where in zip(specs, places, strict=True))
        for kind in ("weights", "gradients", "optimizer")
    }
    num_early = sum(drafted is not InBackward.NOTHING for drafted in early)
    return replace(
        plan,
        device_bytes=plan.device_bytes if plan.device_bytes is not None else means.device_bytes,
        host_bytes=means.host_bytes,
        disk_bytes=means.disk_bytes,
        host_threads=means.host_threads,
        early_units=None if plan.early_units is None and not num_early else num_early,
        **named,  # type: ignore[arg-type]
    )


def _early_limits(plan: Plan, device_type: str) -> tuple[int, float]:
    """How many units may be updated inside the backward, and which part of the host's spare memory they may take."""
    if plan.early_units is not None:
        return plan.early_units, 1.0
    # Beside a GPU the host is idle in the backward; without one, it is the host that computes.
    return (2**62, EARLY_PART) if device_type == "cuda" and plan.keeps_gradients else (0, 0.0)


def _choose_early(
    specs: Sequence[UnitSpec],
    sizes: Sequence[UnitBytes],
    places: Sequence[UnitPlace],
    streamed: Sequence[bool],
    limits: tuple[int, float],
    host_room: int,
) -> tuple[InBackward, ...]:
    """What of which units is written inside the backward. Leaves room to add up the gradients of several backwards."""
    rows = list(zip(sizes, places, strict=True))
    spare = host_room - sum_bytes(sizes, places, "host")
    spare -= sum(unit.summed_gradients - unit.gradients for unit, where in rows if where.gradients == "host")
    most, part = limits
    able = [
        (where.weights, where.gradients, where.optimizer) == ("host",) * 3
        and not is_streamed
        and isinstance(spec.rule, NativeRule)
        for spec, where, is_streamed in zip(specs, places, streamed, strict=True)
    ]
    return choose_drafts(sizes, able, most, int(spare * part))


def _stream(
    specs: Sequence[UnitSpec], places: Sequence[UnitPlace], machine: MachineRates, *, carries: bool
) -> tuple[bool, ...]:
    """Which units the GPU updates as they stream through it: some of those with states on the host, those that are
    updated as whole tensors and, if a lane `carries` them, those of which only the weights are not on the GPU.
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


def _check(specs: Sequence[UnitSpec], plan: Plan) -> None:
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
