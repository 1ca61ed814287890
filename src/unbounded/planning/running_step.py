"""Predicts one step of a model that is already sharded.

Only what its blocks will keep is still open. `Headroom` decides that while it runs, and the prediction does the same.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from unbounded.activations.checkpointed import attached_to
from unbounded.activations.rehearsal import BlockSizes, PassSizes, rehearse
from unbounded.native.host_memory import PAGE_BYTES
from unbounded.optim.formats import DTYPES, MASTER_STATES
from unbounded.optim.rules import NativeRule
from unbounded.planner.evaluation import Request, evaluate
from unbounded.planner.machine import MachineRates, saved_machine
from unbounded.planner.models.footprint import (
    STATE_BYTES,
    Footprint,
    expand,
)
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.step.early_updates import Move, Touched, begin_in_backward
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.logits import tile_bytes
from unbounded.planner.step.peaks import kept_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.step.streaming import stream_rate
from unbounded.planning.module_footprint import footprint_of_module, rule_bytes
from unbounded.sharding.running import sharded
from unbounded.tiers import budget as budgets
from unbounded.tiers.array import array_bytes
from unbounded.tiers.budget import SUM_BYTES
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.step.early.in_backward import InBackward
from unbounded.zero.unit import Unit


def predict_step(
    model: nn.Module, *, tokens: int, sequence: int, accumulate: int = 1, machine: MachineRates | None = None
) -> Prediction | None:
    """One step of a sharded model as it is placed: `tokens` of each of `accumulate` micro-batches on this rank.

    None if the machine was not measured by this version, because typical rates would say nothing about this one, and
    if the job has a tensor, pipeline or context axis: what such ranks send each other is not hidden, and one process
    cannot measure how fast it goes. What blocks keep is what "auto" will decide while it runs. Updates begin inside the
    backward if the last steps have shown that they can: they cannot where gradients are clipped.
    """
    machine, state = machine or saved_machine(), sharded(model)
    axes = state.engine.axes
    if machine is None or max(axes.tensor.size, axes.pipeline.size, axes.context.size) > 1:
        return None
    placed, ranks = state.plan, state.engine.ranks.size
    local = budgets.local_size(ranks)
    sharing = local if machine.is_cpu else 1  # one process measured all cores
    machine = replace(
        machine,
        matmul_flops=machine.matmul_flops / sharing,
        fp32_flops=machine.fp32_flops / sharing,
        device_bandwidth=machine.device_bandwidth / sharing,
        devices=local,
        nodes=max(1, ranks // local),
        host_threads=budgets.host_threads(placed, ranks) * local,
        network_bandwidth=machine.network_bandwidth or UNMEASURED.network_bandwidth,
    )
    dtype = DTYPES[str(placed.precision)]
    states = STATE_BYTES[str(placed.precision), "exact"]
    for unit in state.engine.units:
        if unit.rule is not None and unit.dtype == dtype:
            states = rule_bytes(unit.rule, dtype)
            break
    setup = Setup(
        tokens=tokens,
        sequence=sequence,
        accumulate=accumulate,
        stage=placed.stage,
        data=ranks,
        prefetch_units=placed.prefetch_units,
        logits_tile_bytes=tile_bytes("cpu" if machine.is_cpu else "cuda", placed.device_bytes),
    )
    footprint = replace(footprint_of_module(model, None, replace(placed, precision=None), sequence), states=states)
    placed = replace(placed, activations=_running_policies(model, state, footprint, setup) or placed.activations)
    request = Request(
        tokens * accumulate * ranks,
        sequence,
        plan=placed,
        formats={placed.optimizer_format: states},
        buffer_bytes=_buffer_bytes(state),
        updates_in_parts=False,  # what of the units is, and what is drafted, is known
    )
    found = evaluate(footprint, machine, setup, placed.optimizer_format, request)
    if found is None:  # the states are placed: only what blocks keep is still to be decided
        tight = replace(placed, device_bytes=2**60, activations=placed.activations if _is_closed(placed) else "host")
        found = evaluate(footprint, machine, setup, placed.optimizer_format, replace(request, plan=tight))
    return begin_in_backward(found.prediction, _moves(state, machine)) if found is not None else None


def _moves(state: Sharded, machine: MachineRates) -> list[list[Move]]:
    """What drafts of everything, drafts of weights, and updates in two parts move to the backward.

    Drafts are those that the last steps have shown to be of use, the last unit first.
    """
    moves: dict[InBackward, list[Move]] = {InBackward.ALL: [], InBackward.WEIGHTS: [], InBackward.MOMENTS: []}
    updates = state.optimizer.updates if state.optimizer is not None else None
    if updates is None or machine.is_cpu:
        return []
    drafts, is_drafted = updates.drafts, updates.drafts.outlook.factor is not None
    kinds = drafts.pace.kinds(is_drafted=is_drafted)
    seconds = machine.devices / (machine.update_rate(state.plan.optimizer_format) + stream_rate(machine))
    for unit in reversed(state.engine.units):
        draft = drafts.of.get(unit) if is_drafted else None
        if draft is not None and draft.kind in kinds:
            weights = array_bytes(unit.weights)
            move = _touched(unit).draft(has_states=draft.has_states, weights=weights)
            moves[draft.kind].append(move.times(seconds))
        elif _has_parts(unit) and InBackward.MOMENTS in kinds:
            moves[InBackward.MOMENTS].append(_touched(unit).in_two_parts().times(seconds))
    return [*moves.values()]


def _has_parts(unit: Unit) -> bool:
    """Whether the host updates it where it is, by a kernel that can do so in two parts."""
    tiers = {array.tier for array in unit.arrays().values()}
    is_fused = isinstance(unit.rule, NativeRule) and unit.rule.format != "compact"
    return is_fused and not unit.streamed and tiers | {unit.gradient.tier} == {"host"}


def _touched(unit: Unit) -> Touched:
    sizes = {name: array_bytes(array) for name, array in unit.arrays().items()}
    master = sum(sizes.pop(name, 0) for name in ("weight", *MASTER_STATES))
    gradient = unit.gradient.store.numel * unit.gradient.store.dtype.itemsize
    return Touched(master, sum(sizes.values()), gradient)


def _running_policies(
    model: nn.Module, state: Sharded, footprint: Footprint, setup: Setup
) -> tuple[tuple[str, str], ...]:
    """What `Headroom` will decide for each block in turn; nothing if the plan has decided."""
    headroom = next((block.headroom for block in attached_to(model) if block.headroom is not None), None)
    blocks = [part for part in expand(footprint.parts) if part.is_block]
    if headroom is None or not blocks:
        return ()
    weights = dict(state.plan.weights) if isinstance(state.plan.weights, tuple) else {}
    is_shared = setup.stage == 3 and setup.data > 1
    gathered = [part for part in expand(footprint.parts) if is_shared or weights.get(part.name, "device") != "device"]
    turn, end = working_bytes(footprint, setup, gathered=gathered, recomputes=True)
    kept_turn, _ = working_bytes(footprint, setup, gathered=gathered, recomputes=False)
    gradients = sum(unit.gradient.device_bytes for unit in state.engine.units if unit.trainable)
    policies = rehearse(
        [BlockSizes(int(setup.tokens * part.cost.input), int(kept_bytes(part, setup))) for part in blocks],
        PassSizes(
            start_bytes=state.tiers.use()["device"].used_bytes,
            turn_bytes=int(turn),
            kept_turn_bytes=int(kept_turn),
            end_bytes=int(end + gradients),
        ),
        headroom.limit_bytes,
    )
    return tuple((part.module_name, policy) for part, policy in zip(blocks, policies, strict=True))


def _is_closed(plan: Plan) -> bool:
    """Whether every block's policy is fixed."""
    policies = plan.activations if isinstance(plan.activations, tuple) else (("*", plan.activations or "auto"),)
    return all(policy != "auto" for _, policy in policies)


def _buffer_bytes(state: Sharded) -> int:
    """Host memory of what a step takes besides states: buffers of updates and of what the disk cannot reach, second
    sets of states, and checksums of what is on disk."""
    units, bounce = state.engine.units, state.bounce
    arrays = [array for unit in units for array in unit.arrays().values()]
    on_disk = sum(array.held_bytes for array in arrays if array.tier == "disk")
    sums = SUM_BYTES * (on_disk // PAGE_BYTES) if state.plan.disk_checksums else 0
    reached = state.engine.device.type == "cpu"  # gathered weights and gradients are on the host themselves
    fetched = any(unit.weights.tier == "disk" for unit in units) and not reached
    stored = any(unit.gradient.tier == "disk" for unit in units) and not reached
    bounced = (fetched + stored) * bounce.buffer_bytes  # each by a lane, one buffer at a time
    updates = state.optimizer.updates if state.optimizer is not None else None
    return sums + bounced + (updates.buffer_bytes() + updates.drafts.num_bytes if updates is not None else 0)
