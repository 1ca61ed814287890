"""The best placements of units and policies of blocks for one way to train: given axes, stage, micro-batch and format.

Both are one integer program (`solve`), because what blocks keep and where states live compete for the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from unbounded.planner.linear.program import Group, Option, Solution, can_fit, solve_program
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.capacity import Capacity, left_for_states
from unbounded.planner.models.footprint import STATE_BYTES, Cost, Footprint, StateBytes, UnitFootprint, expand
from unbounded.planner.plan import TIERS, Plan
from unbounded.planner.solve import StateChoice, build_program
from unbounded.planner.step.loads import Setup, activation_loads, base_loads, unit_bytes
from unbounded.planner.step.peaks import activation_moments, moment_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.unit_bytes import UnitBytes, UnitPlace, read_placement

# The part of each tier that a job may plan with. The rest is for the driver, the allocator's gaps and the system.
USABLE = {"device": 0.9, "host": 0.9, "disk": 0.95}
POLICIES = ("keep", "recompute", "host")
# Nodes of a program: few to rank ways, many for the one that is chosen.
FEW_NODES, MANY_NODES = 4, 60


@dataclass(frozen=True)
class Request:
    """What is asked for: tokens of a step over all ranks, and what is fixed already."""

    tokens: int
    sequence: int = 2048
    plan: Plan = field(default_factory=Plan)
    formats: Mapping[str, StateBytes] = field(default_factory=lambda: {"exact": STATE_BYTES["bf16", "exact"]})
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
    capacity: Capacity | None = None  # how large a model could be, at stage 3

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def axes(self) -> str:
        setup = self.setup
        return f"data {setup.data} x tensor {setup.tensor} x pipeline {setup.pipeline}"


def rooms(machine: MachineRates, plan: Plan, num_devices: int) -> dict[str, float]:
    """What one rank may use of each tier: what the plan says, otherwise its part of what is usable.

    At most nine tenths of a device's memory are planned: the rest is lost between the allocator's blocks.
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
    """The best placements and policies for one way; None if nothing fits or `cutoff` seconds are not beaten."""
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
    """Whether units are gathered and whether blocks run again, which take working memory. Variants without them exist
    only if neither the axes nor the plan need them."""
    weights = {read_placement(plan.weights, part.name) for part in parts}
    policies = {read_placement(plan.activations, part.block_name) for part in parts if part.is_block}
    must_gather = (setup.stage == 3 and setup.data > 1) or not weights <= {None, "device"}
    must_recompute = not policies <= {None, "auto", "keep"}
    return [
        (gathers, recomputes)
        for gathers in (False, True)
        for recomputes in (False, True)
        if gathers >= must_gather and recomputes >= must_recompute
    ]


def _parts_of_rank(footprint: Footprint, setup: Setup) -> list[UnitFootprint]:
    """What the fullest rank of the pipeline has: its blocks, and everything outside blocks."""
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
                alike.setdefault((part.cost, self._policies(part.block_name)), []).append(part)
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
            tuple(zip(names, places, strict=True)), tuple((part.block_name, policy) for part, policy in policies),
            self._capacity(),
        )  # fmt: skip

    def _capacity(self) -> Capacity | None:
        """For a model with more such blocks, which run again one at a time. Below stage 3 each rank has all weights."""
        if self.setup.stage < 3:
            return None
        working = max(working_bytes(self.footprint, self.setup, gathers=True, recomputes=True))
        ranks = self.setup.data * self.setup.model_ranks
        room = rooms(self.machine, self.request.plan, ranks)
        left = left_for_states(room, working=working, buffers=self.request.buffer_bytes, num_ranks=ranks)
        return Capacity(self.footprint, left, self.request.plan.keeps_gradients)

    def _spread(self, counts: Sequence[Sequence[int]]) -> list[tuple[UnitFootprint, str]]:
        """The last blocks keep, because what they keep is freed first."""
        chosen = []
        for (policies, members), numbers in zip(self.blocks, counts, strict=True):
            spread = [policy for policy, count in zip(policies, numbers, strict=True) for _ in range(count)]
            chosen += list(zip(members, reversed(spread), strict=True))
        return chosen

    def _held(
        self, places: Sequence[UnitPlace], policies: Sequence[tuple[UnitFootprint, str]]
    ) -> dict[str, dict[str, float]]:
        """Bytes by tier and kind; for the device, when it holds the most."""
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
