"""The best way to train a model on a machine: axes, stage, micro-batch, format, the tiers of units, policies of blocks.

Choices with few values (axes, stage, format, micro-batch) are tried in the order of the best that each can reach.
`evaluation` chooses placements and activation policies for each. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from unbounded.errors import BudgetError, PlanError
from unbounded.planner.evaluation import FEW_NODES, Candidate, Request, evaluate, less_than, rooms
from unbounded.planner.explanation import count
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.capacity import capacity_of
from unbounded.planner.models.footprint import Footprint, expand
from unbounded.planner.plan import TIERS, Plan
from unbounded.planner.sizes import format_bytes
from unbounded.planner.step.loads import Setup, base_loads
from unbounded.planner.step.logits import tile_bytes
from unbounded.planner.step.peaks import working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.unit_bytes import KINDS, check_patterns, may_pack


def search(footprint: Footprint, machine: MachineRates, request: Request) -> Candidate:
    """The way with the least predicted step time; if none fits, a BudgetError says what is short."""
    _check_plan(footprint, machine, request.plan)
    best: Candidate | None = None
    for bound, setup, state_format in _ways(footprint, machine, request):
        cutoff = math.inf if best is None else less_than(best.cost)
        if bound >= cutoff:
            break
        found = evaluate(footprint, machine, setup, state_format, request, cutoff=cutoff, max_nodes=FEW_NODES)
        best = found or best
    if best is None:
        raise _nothing_fits(footprint, machine, request)
    return evaluate(footprint, machine, best.setup, best.format, request) or best


def compare_ways(footprint: Footprint, machine: MachineRates, request: Request, limit: int = 12) -> list[Candidate]:
    """The best `limit` combinations of axes, stage and format, each at its best, the best first."""
    best: dict[tuple[int, int, int, str], Candidate] = {}
    for bound, setup, state_format in _ways(footprint, machine, request):
        key = (setup.stage, setup.tensor, setup.pipeline, state_format)
        costs = sorted(way.cost for way in best.values())[:limit]
        last = costs[-1] if len(costs) == limit else math.inf
        cutoff = less_than(min(best[key].cost, last) if key in best else last)
        if bound >= less_than(last):
            break
        if bound >= cutoff:
            continue
        found = evaluate(footprint, machine, setup, state_format, request, cutoff=cutoff, max_nodes=FEW_NODES)
        if found is not None:
            best[key] = found
    return sorted(best.values(), key=lambda candidate: candidate.cost)[:limit]


def _ways(footprint: Footprint, machine: MachineRates, request: Request) -> list[tuple[float, Setup, str]]:
    """Every way with the best it can reach, the most promising first."""
    ways = []
    for state_format, states in request.formats.items():
        formatted = replace(footprint, states=states)
        computing = machine.for_weights(states.weights)
        for setup in _setups(footprint, machine, request):
            lanes = base_loads(formatted, computing, setup)
            at_best = Prediction(setup, computing, tuple(lanes.seconds), 0.0).seconds
            ways.append((at_best, setup, state_format))
    if not ways:
        raise _no_way(footprint, machine, request)
    return sorted(ways, key=lambda way: (way[0], way[1].tensor, way[1].pipeline, -way[1].stage))


def _setups(footprint: Footprint, machine: MachineRates, request: Request) -> Iterator[Setup]:
    sequence = min(request.sequence, request.tokens)
    rows, num_devices = request.tokens // sequence, machine.num_devices
    layers = max(1, footprint.layers)
    if request.tokens % sequence:
        return
    for tensor in _divisors(machine.devices, request.tensors):
        for pipeline in _divisors(num_devices // tensor, request.pipelines):
            data = num_devices // tensor // pipeline
            if pipeline > layers or layers % pipeline or rows % data or rows < data:
                continue
            for micro in _micro_batches(rows // data):
                accumulate = rows // data // micro
                if request.accumulate not in (None, accumulate) or (pipeline > 1 and accumulate < pipeline):
                    continue
                if accumulate > 1 and not request.plan.keeps_gradients:
                    continue
                for stage in request.stages:
                    # A pipeline that gathers weights for every micro-batch is never best.
                    if pipeline > 1 and stage > 1 and len(request.stages) > 1:
                        continue
                    if stage < 3 and request.plan.offloads_weights:
                        continue
                    yield Setup(
                        tokens=micro * sequence,
                        sequence=sequence,
                        accumulate=accumulate,
                        stage=stage,
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        prefetch_units=request.plan.prefetch_units,
                        logits_tile_bytes=tile_bytes("cpu" if machine.is_cpu else "cuda", request.plan.device_bytes),
                    )


def _no_way(footprint: Footprint, machine: MachineRates, request: Request) -> PlanError:
    """Why no axes and micro-batches are possible with what is fixed."""
    devices, layers = machine.num_devices, max(1, footprint.layers)
    tensors = _divisors(machine.devices, request.tensors)
    if not tensors:
        return PlanError(
            f"tensor is {_either(request.tensors)}, but it must divide the {machine.devices} devices of a node. "
            f"Choose one of {_either(_divisors(machine.devices, None))}."
        )
    possible = [p for p in _divisors(devices // tensors[0], None) if layers % p == 0]
    if request.pipelines is not None and not {*possible} & {*request.pipelines}:
        return PlanError(
            f"pipeline is {_either(request.pipelines)}, but it must divide the {layers} layers of the model and the "
            f"{devices // tensors[0]} devices that the tensor axis leaves. Choose one of {_either(possible)}."
        )
    if request.accumulate is not None:
        return PlanError(
            f"tokens is {request.tokens:,}, which cannot be cut into {request.accumulate} micro-batches of whole "
            f"sequences of {request.sequence:,} on every rank. Give other tokens, or leave microbatches open."
        )
    return PlanError(
        f"tokens is {request.tokens:,}, which is not a whole number of sequences of {request.sequence:,} for each "
        f"device, of which there are {devices:,}. Give a multiple of {devices * request.sequence:,}, or fewer devices."
    )


def _either(numbers: Sequence[int] | None) -> str:
    return ", ".join(map(str, numbers or ()))


def _check_plan(footprint: Footprint, machine: MachineRates, plan: Plan) -> None:
    """A pattern must match, a budget may not promise more than the machine has."""
    names = [part.name for part in expand(footprint.parts)]
    for kind in KINDS:
        check_patterns(getattr(plan, kind), kind, names)
    blocks = dict.fromkeys(part.module_name for part in expand(footprint.parts) if part.is_block)
    check_patterns(plan.activations, "activations", list(blocks), "block")
    for tier in TIERS:
        given, has = getattr(plan, f"{tier}_bytes"), getattr(machine, f"{tier}_bytes")
        if given is not None and given > has:
            raise PlanError(
                f"{tier}_bytes is {format_bytes(given)}, but the machine {machine.name!r} has {format_bytes(has)}. "
                "Give no more than that, or plan for another machine."
            )


def _divisors(number: int, allowed: tuple[int, ...] | None) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return [
        value
        for value in sorted({*small, *(number // value for value in small)})
        if allowed is None or value in allowed
    ]


def _micro_batches(rows: int) -> list[int]:
    """Powers of two that divide the rows of a rank, and all of them."""
    powers = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
    return sorted({*powers, rows})


def _nothing_fits(footprint: Footprint, machine: MachineRates, request: Request) -> BudgetError:
    """What is short in the way that needs the least, and what would help."""
    setups = [way[1] for way in _ways(footprint, machine, request)]
    setup = min(setups, key=lambda s: (s.tokens, -s.stage, -s.tensor, -s.pipeline))
    formatted = replace(footprint, states=min(request.formats.values(), key=lambda states: states.total))
    room = rooms(machine, request.plan, machine.num_devices)
    working = max(working_bytes(formatted, setup, gathered=formatted.parts, recomputes=True))
    ranks, keeps = machine.num_devices, request.plan.keeps_gradients
    packs = may_pack(request.plan, is_cpu=machine.is_cpu)
    capacity = capacity_of(
        formatted,
        room,
        working=working,
        num_ranks=ranks,
        keeps_gradients=keeps,
        may_drop=request.plan.may_drop_gradients and setup.pipeline == 1,
        packs=packs,
    )
    states, total = capacity.states_bytes(keeps_gradients=keeps), capacity.left_bytes
    whole = formatted.numel * formatted.states.weights / setup.model_ranks
    if setup.stage < 3 and whole > room["device"]:
        fact = (
            f"stage {setup.stage} keeps whole weights on every device, which take {format_bytes(whole)}, but there are "
            f"{format_bytes(room['device'])}"
        )
        remedy = "Use stage 3, a device with more memory, or a tensor axis."
    elif working > room["device"]:
        fact = (
            f"running one unit at a time takes {format_bytes(working)} of device memory, but there are "
            f"{format_bytes(room['device'])}"
        )
        wider = "" if setup.tensor == machine.devices else "a tensor axis, "
        remedy = f"Take a device with more memory, {wider}narrower layers, or fewer tokens per micro-batch."
    elif states <= total:
        put = [kind for kind in (*KINDS, "activations") if getattr(request.plan, kind) is not None]
        put = ["stage", *put] if len(request.stages) == 1 else put
        has = ", ".join(f"{tier} {format_bytes(room[tier])}" for tier in TIERS)
        fact = (
            f"its states take {format_bytes(states)} of {format_bytes(total)} that there are for them, but not with "
            f"what the plan fixes ({', '.join(put)}) in these budgets: {has}"
        )
        remedy = "Leave more of the plan open, or raise the budget of the tier that it names."
    else:
        fact = (
            f"its states take {format_bytes(states)}, but {ranks} x {machine.name.partition(':')[0]} have "
            f"{format_bytes(total)} of device, host and disk for them"
        )
        most = capacity.most(keeps_gradients=keeps)
        needed = math.ceil(ranks * formatted.numel / most) if most else 0
        remedy = (
            f"It would fit on {needed} such devices. Here fit {capacity.describe()}. "
            'optimizer_format="compact" takes less than half.'
            if needed
            else "Give it a host or a disk budget."
        )
    return BudgetError(f"{footprint.name} with {count(footprint.numel)} parameters fits nowhere: {fact}. {remedy}")
