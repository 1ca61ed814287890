"""Predicts one step of a model that is already sharded.

Only what its blocks will keep is still open. `Headroom` decides that while it runs, and the prediction does the same.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from unbounded.activations.checkpointed import attached_to
from unbounded.activations.headroom import choose_policy
from unbounded.optim.formats import DTYPES
from unbounded.planner.evaluation import Request, evaluate
from unbounded.planner.machine import MachineRates, saved_machine
from unbounded.planner.models.footprint import (
    STATE_BYTES,
    Footprint,
    expand,
)
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.logits import tile_bytes
from unbounded.planner.step.peaks import kept_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planning.module_footprint import footprint_of_module, rule_bytes
from unbounded.sharding.running import sharded
from unbounded.tiers import budget as budgets
from unbounded.zero.setup.assembly import Sharded


def predict_step(
    model: nn.Module, *, tokens: int, sequence: int, accumulate: int = 1, machine: MachineRates | None = None
) -> Prediction | None:
    """One step of a sharded model as it is placed: `tokens` of each of `accumulate` micro-batches on this rank.

    None if the machine was not measured by this version, because typical rates would say nothing about this one, and
    if the job has a tensor, pipeline or context axis: what such ranks send each other is not hidden, and one process
    cannot measure how fast it goes. What blocks keep is what "auto" will decide while it runs.
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
    footprint = replace(footprint_of_module(model, None, replace(placed, precision=None)), states=states)
    placed = replace(placed, activations=_running_policies(model, state, footprint, setup) or placed.activations)
    request = Request(
        tokens * accumulate * ranks,
        sequence,
        plan=placed,
        formats={placed.optimizer_format: states},
        buffer_bytes=_buffer_bytes(state),
    )
    found = evaluate(footprint, machine, setup, placed.optimizer_format, request)
    if found is None:  # the states are placed: only what blocks keep is still to be decided
        tight = replace(placed, device_bytes=2**60, activations=placed.activations if _is_closed(placed) else "host")
        found = evaluate(footprint, machine, setup, placed.optimizer_format, replace(request, plan=tight))
    return found.prediction if found is not None else None


def _running_policies(
    model: nn.Module, state: Sharded, footprint: Footprint, setup: Setup
) -> tuple[tuple[str, str], ...]:
    """What `Headroom` will decide for each block in turn; nothing if the plan has decided."""
    headroom = next((block.headroom for block in attached_to(model) if block.headroom is not None), None)
    blocks = [part for part in expand(footprint.parts) if part.is_block]
    if headroom is None or not blocks:
        return ()
    weights = dict(state.plan.weights) if isinstance(state.plan.weights, tuple) else {}
    gathers = any(tier != "device" for tier in weights.values()) or (setup.stage == 3 and setup.data > 1)
    free: float = headroom.limit_bytes - state.tiers.use()["device"].used_bytes
    sizes = [(setup.tokens * part.cost.input, kept_bytes(part, setup)) for part in blocks]
    turn, _ = working_bytes(footprint, setup, gathers=gathers, recomputes=False)
    if turn + sum(kept for _, kept in sizes) <= free:
        return tuple((part.block_name, "keep") for part in blocks)
    turn, _ = working_bytes(footprint, setup, gathers=gathers, recomputes=True)
    chosen = []
    for index, (part, (entering, kept)) in enumerate(zip(blocks, sizes, strict=True)):
        policy = choose_policy(
            free_bytes=int(free),
            input_bytes=int(entering),
            kept_bytes=int(kept),
            num_later=len(blocks) - index - 1,
            tail_bytes=int(turn),
            first_tail=0,
        )
        free -= {"keep": kept, "recompute": entering, "host": 0.0}[policy]
        chosen.append((part.block_name, policy))
    return tuple(chosen)


def _is_closed(plan: Plan) -> bool:
    """Whether every block's policy is fixed."""
    policies = plan.activations if isinstance(plan.activations, tuple) else (("*", plan.activations or "auto"),)
    return all(policy != "auto" for _, policy in policies)


def _buffer_bytes(state: Sharded) -> int:
    """Bytes of all leased buffers. Those for updates exist only if states are on disk, and hold no more than there is
    to move through them."""
    units, plan = state.engine.units, state.plan
    held = {"host": 0, "disk": 0, "device": 0}
    for unit in units:
        for array in (unit.weights, *unit.states.values()):
            held[array.tier] += array.numel * array.dtype.itemsize
    for unit, (_, tier) in zip(units, (plan.gradients or ()) if plan.keeps_gradients else (), strict=False):
        held[tier] += (unit.owned[1] - unit.owned[0]) * unit.dtype.itemsize if unit.states else 0
    drafts = state.optimizer.updates.drafts.num_bytes if state.optimizer is not None else 0
    planned = max(0, state.tiers.planned_host_bytes - held["host"] - drafts)
    return min(planned, held["disk"] if held["disk"] else 2**27, max(held.values()))
