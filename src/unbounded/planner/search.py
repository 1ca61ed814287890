"""The best way to train a model on a machine: axes, stage, micro-batch, format, the tiers of units, policies of blocks.

What is discrete and few (axes, stage, format, micro-batch) is tried in the order of the best that each can reach;
for each the integer program of `solve` chooses placements and activation policies together. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from unbounded.errors import BudgetError, PlanError
from unbounded.planner.linear.program import Group, Option, Solution, can_fit, solve_program
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.capacity import Capacity, left_for_states
from unbounded.planner.models.footprint import FORMATS, Cost, Footprint, StateBytes, UnitFootprint, expand
from unbounded.planner.plan import Plan
from unbounded.planner.sizes import format_bytes
from unbounded.planner.solve import StateChoice, build_program
from unbounded.planner.step.loads import (
    TIERS,
    Setup,
    activation_loads,
    base_loads,
    unit_bytes,
)
from unbounded.planner.step.logits import tile_bytes
from unbounded.planner.step.peaks import activation_moments, moment_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.unit_bytes import UnitBytes, UnitPlace, read_placement

# The part of each tier that a job may plan with. The rest is the driver's, the allocator's gaps, the system's.
USABLE = {"device": 0.9, "host": 0.9, "disk": 0.95}
POLICIES = ("keep", "recompute", "host")
# Nodes of a program: few to rank ways by, many for the one that is taken.
FEW_NODES, MANY_NODES = 4, 60


@dataclass(frozen=True)
class Request:
    """What is asked for: tokens of a step over all ranks, and what is fixed already."""

    tokens: int
    sequence: int = 2048
    plan: Plan = field(default_factory=Plan)
    formats: Mapping[str, StateBytes] = field(default_factory=lambda: {"exact": FORMATS["bf16", "exact"]})
    stages: tuple[int, ...] = (3,)
    tensors: tuple[int, ...] | None = None  # None: any
    pipelines: tuple[int, ...] | None = None
    accumulate: int | None = None
    buffer_bytes: int = 2**30  # of the host, for the buffers of all lanes of one rank


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its prediction."""

    footprint: Footprint
    setup: Setup
    format: str
    prediction: Prediction
    places: tuple[tuple[str, UnitPlace], ...]  # by unit, in the order of the forward
    policies: tuple[tuple[str, str], ...]  # by block
    capacity: Capacity | None = None  # at stage 3, what else would fit

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def axes(self) -> str:
        setup = self.setup
        return f"data {setup.data} x tensor {setup.tensor} x pipeline {setup.pipeline}"


def search(footprint: Footprint, machine: MachineRates, request: Request) -> Candidate:
    """The way with the least predicted step time; a BudgetError that says what is short where none fits."""
    best: Candidate | None = None
    for bound, setup, state_format in _ways(footprint, machine, request):
        if best is not None and bound >= best.seconds:
            break
        cutoff = best.seconds if best is not None else math.inf
        found = evaluate(footprint, machine, setup, state_format, request, cutoff=cutoff, max_nodes=FEW_NODES)
        if found is not None and found.seconds < cutoff:
            best = found
    if best is None:
        raise _nothing_fits(footprint, machine, request)
    return evaluate(footprint, machine, best.setup, best.format, request) or best


def compare_ways(footprint: Footprint, machine: MachineRates, request: Request, limit: int = 12) -> list[Candidate]:
    """The best of every combination of axes, stage and format, fastest first."""
    best: dict[tuple[int, int, int, str], Candidate] = {}
    for bound, setup, state_format in _ways(footprint, machine, request):
        key = (setup.stage, setup.tensor, setup.pipeline, state_format)
        if key in best and bound >= best[key].seconds:
            continue
        if key not in best and len(best) >= 3 * limit:
            continue
        cutoff = best[key].seconds if key in best else math.inf
        found = evaluate(footprint, machine, setup, state_format, request, cutoff=cutoff, max_nodes=FEW_NODES)
        if found is not None and found.seconds < cutoff:
            best[key] = found
    return sorted(best.values(), key=lambda candidate: candidate.seconds)[:limit]


def _ways(footprint: Footprint, machine: MachineRates, request: Request) -> list[tuple[float, Setup, str]]:
    """Every way with what it can reach at best, the most promising first."""
    if request.tokens < 1:
        raise PlanError(f"tokens is {request.tokens}, but a step needs at least one token.")
    ways = []
    for state_format, states in request.formats.items():
        formatted = replace(footprint, states=states)
        for setup in _setups(footprint, machine, request):
            lanes = base_loads(formatted, machine, setup)
            at_best = Prediction(setup, machine, tuple(lanes.seconds), 0.0).seconds
            ways.append((at_best, setup, state_format))
    if not ways:
        raise PlanError(
            f"{request.tokens:,} tokens are no whole number of sequences of {request.sequence:,} for each of "
            f"{machine.num_devices} devices. Give a multiple of {request.sequence:,}, or fewer devices."
        )
    return sorted(ways, key=lambda way: (way[0], way[1].tensor, way[1].pipeline, -way[1].stage))


def _setups(footprint: Footprint, machine: MachineRates, request: Request) -> Iterator[Setup]:
    sequence = min(request.sequence, request.tokens)
    rows, num_devices = request.tokens // sequence, machine.num_devices
    layers = max(1, footprint.layers)
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
                    if (stage == 0 and data > 1 and 0 not in request.stages) or (pipeline > 1 and stage > 1):
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


def _divisors(number: int, allowed: tuple[int, ...] | None) -> list[int]:
    found = [value for value in range(1, number + 1) if number % value == 0]
    return [value for value in found if allowed is None or value in allowed]


def _micro_batches(rows: int) -> list[int]:
    """Powers of two that divide the rows of a rank, and all of them."""
    powers = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
    return sorted({*powers, rows})


def rooms(machine: MachineRates, plan: Plan, num_devices: int) -> dict[str, float]:
    """What one rank may use of each tier: what the plan says, otherwise its part of what is usable.

    Of a device's memory nine tenths are planned with in any case: the rest falls between the allocator's blocks.
    """
    inside = min(machine.devices, num_devices)
    device = (plan.device_bytes if plan.device_bytes is not None else machine.device_bytes) * USABLE["device"]
    host = plan.host_bytes if plan.host_bytes is not None else machine.host_bytes * USABLE["host"] / inside
    disk = plan.disk_bytes if plan.disk_bytes is not None else machine.disk_bytes * USABLE["disk"] / inside
    return {"device": float(device), "host": float(host), "disk": float(disk)}


def evaluate(
    footprint: Footprint,
    machine: MachineRates,
    setup: Setup,
    state_format: str,
    request: Request,
    *,
    cutoff: float = math.inf,
    max_nodes: int = MANY_NODES,
) -> Candidate | None:
    """The best placements and policies for one way; None where nothing fits or `cutoff` seconds are not beaten."""
    footprint = replace(footprint, states=request.formats[state_format])
    setup = replace(setup, state_format=state_format)
    parts = _parts_of_rank(footprint, setup)
    units = [unit_bytes(part, footprint, setup) for part in parts]
    room = rooms(machine, request.plan, setup.data * setup.model_ranks)
    best: Candidate | None = None
    for gathers, recomputes in _variants(parts, setup, request.plan):
        working = working_bytes(footprint, setup, gathers=gathers, recomputes=recomputes)
        host = max(0.0, room["host"] - request.buffer_bytes)
        left = [*(room["device"] - more for more in working), host, room["disk"]]
        if min(left) < 0:
            continue
        limit = best.seconds if best is not None else cutoff
        choice = _Joint(footprint, parts, units, machine, setup, request, gathers=gathers, recomputes=recomputes)
        found = choice.solve(left, state_format, limit, max_nodes)
        if found is not None:
            best = found
    return best


def _variants(parts: Sequence[UnitFootprint], setup: Setup, plan: Plan) -> list[tuple[bool, bool]]:
    """Whether units are gathered and blocks run again, which takes working memory: without each only where neither
    the axes nor the plan ask for it."""
    weights = {read_placement(plan.weights, part.name) for part in parts}
    policies = {read_placement(plan.activations, part.name) for part in parts if part.is_block}
    must_gather = (setup.stage == 3 and setup.data > 1) or not weights <= {None, "device"}
    must_recompute = not policies <= {None, "auto", "keep"}
    return [
        (gathers, recomputes)
        for gathers in (False, True)
        for recomputes in (False, True)
        if gathers >= must_gather and recomputes >= must_recompute
    ]


def _parts_of_rank(footprint: Footprint, setup: Setup) -> list[UnitFootprint]:
    """What the fullest rank of the pipeline has: its blocks, and all that is outside them."""
    parts = expand(footprint)
    blocks = [part for part in parts if part.is_block]
    keeps = set(map(id, blocks[: math.ceil(len(blocks) / setup.pipeline)]))
    return [part for part in parts if not part.is_block or id(part) in keeps]


class _Joint:
    """Placements of units and policies of blocks as one program."""

    def __init__(
        self,
        footprint: Footprint,
        parts: Sequence[UnitFootprint],
        units: Sequence[UnitBytes],
        machine: MachineRates,
        setup: Setup,
        request: Request,
        *,
        gathers: bool,
        recomputes: bool,
    ) -> None:
        self.footprint, self.parts, self.units, self.machine = footprint, parts, units, machine
        self.setup, self.request, self.gathers, self.recomputes = setup, request, gathers, recomputes
        alike: dict[tuple[Cost, tuple[str, ...]], list[UnitFootprint]] = {}
        for part in parts:
            if part.is_block:
                alike.setdefault((part.cost, self._policies(part.name)), []).append(part)
        self.blocks = [(policies, members) for (_, policies), members in alike.items()]

    def _policies(self, name: str) -> tuple[str, ...]:
        fixed = read_placement(self.request.plan.activations, name)
        if fixed not in (None, "auto"):
            return (str(fixed),)
        return POLICIES if self.recomputes else ("keep",)

    def _activation_groups(self) -> list[Group]:
        groups = []
        for policies, members in self.blocks:
            options = []
            for policy in policies:
                loads, held = activation_loads(members[0], policy, self.machine, self.setup)
                taken = activation_moments(held)
                options.append(Option((policy,), tuple(loads.seconds), taken, 1e-6 * sum(loads.seconds)))
            groups.append(Group(members[0].name, len(members), tuple(options)))
        return groups

    def solve(self, room: Sequence[float], state_format: str, cutoff: float, max_nodes: int) -> Candidate | None:
        plan = self.request.plan
        if not self.gathers and plan.weights is None:
            plan = replace(plan, weights="device")
        base = base_loads(self.footprint, self.machine, self.setup).seconds
        for uses_disk in (False, True):
            take = partial(moment_bytes, setup=self.setup)
            choice = StateChoice(self.units, plan, self.machine, self.setup, uses_disk=uses_disk, take=take)
            groups = [*choice.groups(), *self._activation_groups()]
            program = build_program(groups, self.setup, room, base)
            solution = solve_program(program, cutoff, max_nodes)
            if solution is not None:
                return self._candidate(choice, groups, solution, base, state_format)
            if math.isfinite(cutoff) and can_fit(program):
                return None  # there is room, but nothing in it is fast enough
        return None

    def _candidate(
        self, choice: StateChoice, groups: Sequence[Group], solution: Solution, base: list[float], state_format: str
    ) -> Candidate:
        lanes = list(base)
        for group, counts in zip(groups, solution.counts, strict=True):
            for option, count in zip(group.options, counts, strict=True):
                if count:
                    lanes = [have + count * more for have, more in zip(lanes, option.seconds, strict=True)]
        states = len(choice.members)
        places = choice.places(replace(solution, counts=solution.counts[:states]))
        policies = self._spread(solution.counts[states:])
        held = self._held(places, policies)
        tokens = self.setup.tokens * self.setup.accumulate * self.setup.data
        prediction = Prediction(
            self.setup, self.machine, tuple(lanes), tokens * self.footprint.flops(self.setup.sequence), held
        )
        names = [part.name for part in self.parts]
        return Candidate(
            self.footprint, self.setup, state_format, prediction,
            tuple(zip(names, places, strict=True)), tuple((part.name, policy) for part, policy in policies),
            self._capacity(),
        )  # fmt: skip

    def _capacity(self) -> Capacity | None:
        """Of a model with more such blocks, run again one at a time: below stage 3 each rank has all weights."""
        if self.setup.stage < 3:
            return None
        working = max(working_bytes(self.footprint, self.setup, gathers=True, recomputes=True))
        ranks = self.setup.data * self.setup.model_ranks
        room = rooms(self.machine, self.request.plan, ranks)
        left = left_for_states(room, working=working, buffers=self.request.buffer_bytes, num_ranks=ranks)
        return Capacity(self.footprint, left, self.request.plan.keeps_gradients)

    def _spread(self, counts: Sequence[Sequence[int]]) -> list[tuple[UnitFootprint, str]]:
        """The last blocks keep: what they keep is given back first."""
        chosen = []
        for (policies, members), numbers in zip(self.blocks, counts, strict=True):
            spread = [policy for policy, count in zip(policies, numbers, strict=True) for _ in range(count)]
            chosen += list(zip(members, reversed(spread), strict=True))
        return chosen

    def _held(
        self, places: Sequence[UnitPlace], policies: Sequence[tuple[UnitFootprint, str]]
    ) -> dict[str, dict[str, float]]:
        """Bytes by tier and kind; of the device at the moment at which it holds the most."""
        turn, end = self._at("turn", places, policies), self._at("end", places, policies)
        held = turn if sum(turn["device"].values()) >= sum(end["device"].values()) else end
        if any(held[tier] for tier in TIERS[1:]):
            held["host"]["buffers"] = float(self.request.buffer_bytes)
        return held

    def _at(
        self, moment: str, places: Sequence[UnitPlace], policies: Sequence[tuple[UnitFootprint, str]]
    ) -> dict[str, dict[str, float]]:
        held: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}

        def add(tier: str, kind: str, num_bytes: float) -> None:
            if num_bytes:
                held[tier][kind] = held[tier].get(kind, 0.0) + num_bytes

        again = self.setup.accumulate > 1
        for unit, where in zip(self.units, places, strict=True):
            add(where.weights, "weights", unit.weights)
            add(where.optimizer, "optimizer", unit.optimizer)
            add(where.remainder, "optimizer", unit.remainder)
            if where.gradients != "device":
                add(where.gradients, "gradients", unit.size("gradients", where.gradients, is_summed=again))
            elif again or moment == "end":
                add("device", "gradients", unit.summed_gradients if again else unit.gradients)
        for part, policy in policies:
            for tier, taken in activation_loads(part, policy, self.machine, self.setup)[1].items():
                if tier != "device" or moment == "turn":
                    add(tier, "activations", taken)
        recomputes = any(policy != "keep" for _, policy in policies)
        gathers = any(where.weights != "device" for where in places) or (self.setup.stage == 3 and self.setup.data > 1)
        working = working_bytes(self.footprint, self.setup, gathers=gathers, recomputes=recomputes)
        add("device", "working memory", working[moment == "end"])
        return held


def _nothing_fits(footprint: Footprint, machine: MachineRates, request: Request) -> BudgetError:
    """What is short in the way that needs the least, and what would remove it."""
    setups = [way[1] for way in _ways(footprint, machine, request)]
    setup = min(setups, key=lambda s: (s.tokens, -s.stage, -s.tensor, -s.pipeline))
    formatted = replace(footprint, states=min(request.formats.values(), key=lambda states: states.total))
    room = rooms(machine, request.plan, machine.num_devices)
    working = max(working_bytes(formatted, setup, gathers=True, recomputes=True))
    ranks, keeps = machine.num_devices, request.plan.keeps_gradients
    total = left_for_states(room, working=working, buffers=0.0, num_ranks=ranks)
    capacity = Capacity(formatted, total, keeps)
    states = capacity.states_bytes(keeps_gradients=keeps)
    if working > room["device"]:
        fact = (
            f"running one unit at a time takes {format_bytes(working)} of a device, which has "
            f"{format_bytes(room['device'])}"
        )
        remedy = "Take a device with more memory, a tensor axis, or fewer tokens a micro-batch."
    else:
        fact = (
            f"its states take {format_bytes(states)}, and {ranks} x {machine.name.partition(':')[0]} have "
            f"{format_bytes(total)} of device, host and disk left for them"
        )
        needed = math.ceil(states / (total / ranks)) if total > 0 else 0
        remedy = (
            f"It would fit on {needed} such devices; here fit {capacity.describe()}. "
            'optimizer_format="compact" takes less than half.'
            if needed
            else "Give it a host or a disk budget."
        )
    name = footprint.name
    return BudgetError(f"{name} with {footprint.numel / 1e9:.4g}B parameters fits nowhere: {fact}. {remedy}")
