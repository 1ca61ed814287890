"""The best placements of units and policies of blocks for one way to train: given axes, stage, micro-batch and format.

Both are one integer program (`solve`), because what blocks keep and where states live compete for the same memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from unbounded.errors import PlanError
from unbounded.planner.linear.program import Group, Option, Solution, solve_program
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.capacity import Capacity, capacity_of
from unbounded.planner.models.footprint import STATE_BYTES, Cost, Footprint, StateBytes, UnitFootprint
from unbounded.planner.models.rank_parts import PartsAlike, find_rank_parts
from unbounded.planner.plan import TIERS, Plan
from unbounded.planner.sizes import allocatable_bytes
from unbounded.planner.solve import PlaceOptions, StateChoice, UnitsAlike, build_program
from unbounded.planner.step.early_updates import Move, Touched, begin_in_backward
from unbounded.planner.step.loads import Setup, activation_loads, base_loads, unit_bytes, updated_from
from unbounded.planner.step.peaks import activation_moments, moment_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.step.streaming import stream_rate
from unbounded.planner.unit_bytes import UnitPlace, may_pack, pack_unit, packings

# The part of host and disk that a job may plan with. The rest is for the system.
USABLE = {"host": 0.9, "disk": 0.95}
# About so many tokens per step and device, if nobody says.
ASSUMED_TOKENS = 4096
# Of a step: more than any machine could take in a year.
MOST_TOKENS = 10**15
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
    updates_in_parts: bool = True  # whether the prediction may have moments updated later than weights

    def __post_init__(self) -> None:
        check_tokens("tokens", self.tokens)
        check_tokens("sequence", self.sequence)


def check_tokens(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise PlanError(f"{name} is {number!r}, but it must be a whole number.")
    if not 1 <= number <= MOST_TOKENS:
        raise PlanError(f"{name} is {number:,}, but it must be at least 1 and at most {MOST_TOKENS:,}.")


def assumed_tokens(machine: MachineRates, sequence: int) -> int:
    """Tokens of a step if nobody says: whole sequences for each device."""
    check_tokens("sequence", sequence)
    return machine.num_devices * max(1, ASSUMED_TOKENS // sequence) * sequence


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its prediction."""

    footprint: Footprint
    setup: Setup
    format: str
    prediction: Prediction
    places: tuple[tuple[str, UnitPlace], ...]  # by unit, in the order of the forward
    policies: tuple[tuple[str, str], ...]  # by block
    room: Mapping[str, float]  # what one rank may use of each tier
    cost: float  # its seconds, and a little for hidden work (`solve`): what ways are compared by
    packs: bool  # whether frozen weights outside the device are packed
    capacity: Capacity | None = None  # how large a model could be, at stage 3

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def axes(self) -> str:
        setup = self.setup
        return f"data {setup.data} x tensor {setup.tensor} x pipeline {setup.pipeline}"


def rooms(machine: MachineRates, plan: Plan, num_devices: int) -> dict[str, float]:
    """What one rank may use of each tier: what the plan says, otherwise its part of what is usable."""
    inside = min(machine.devices, num_devices)
    device = allocatable_bytes(plan.device_bytes if plan.device_bytes is not None else machine.device_bytes)
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
    """The best placements and policies for one way; None if nothing fits or none costs less than `cutoff`."""
    footprint = replace(footprint, states=request.formats[state_format])
    machine = machine.for_weights(footprint.states.weights)
    way = _WayProgram(footprint, machine, replace(setup, state_format=state_format), request)
    best: _Chosen | None = None
    for gathers, recomputes in way.variants():
        limit = cutoff if best is None else less_than(best.cost)
        best = way.solve(gathers, recomputes, limit, max_nodes) or best
    return None if best is None else way.candidate(best)


def less_than(cost: float) -> float:
    """What another choice must stay below to be better: equal ones differ in their last digits."""
    return cost * (1 - 1e-6)


@dataclass(frozen=True)
class _Chosen:
    cost: float
    lanes: tuple[float, ...]
    places: tuple[UnitPlace, ...]  # by position
    policies: tuple[tuple[int, str], ...]  # by position
    packs: bool  # whether frozen weights outside the device are packed


class _WayProgram:
    """Placements of units and policies of blocks as one program, for one setup."""

    def __init__(self, footprint: Footprint, machine: MachineRates, setup: Setup, request: Request) -> None:
        self.footprint, self.machine, self.setup, self.request = footprint, machine, setup, request
        self.plan = replace(request.plan, stage=setup.stage)
        self.rank = find_rank_parts(footprint.parts, self.plan, setup.pipeline)
        self.room = rooms(machine, self.plan, setup.data * setup.model_ranks)
        self.base = base_loads(footprint, machine, setup).seconds
        self.options = PlaceOptions(machine, setup, partial(moment_bytes, setup=setup))
        self._activation_options: dict[tuple[Cost, str], Option] = {}

    def variants(self) -> list[tuple[bool, bool]]:
        """Whether units are gathered and whether blocks run again, which take working memory: what the axes and the
        plan need, otherwise both."""
        weights = {dict(kind.fixed).get("weights") for kind in self.rank.kinds}
        policies = {kind.policy for kind in self.rank.kinds if kind.part.is_block}
        must_gather = (self.setup.stage == 3 and self.setup.data > 1) or not weights <= {None, "device"}
        must_recompute = not policies <= {None, "keep"}
        return [
            (gathers, recomputes)
            for gathers in ([True] if must_gather else [False, True] if None in weights else [False])
            for recomputes in ([True] if must_recompute else [False, True] if None in policies else [False])
        ]

    def solve(self, gathers: bool, recomputes: bool, cutoff: float, max_nodes: int) -> _Chosen | None:
        gathered = self.footprint.parts if gathers else ()  # those that stay on the device are not known yet
        working = working_bytes(self.footprint, self.setup, gathered=gathered, recomputes=recomputes)
        host = max(0.0, self.room["host"] - self.request.buffer_bytes)
        left = [*(self.room["device"] - more for more in working), host, self.room["disk"]]
        if min(left) < 0:
            return None
        units = self._units(gathers)
        blocks = self._blocks(recomputes)
        activations = self._activation_groups(blocks)
        best, fits = None, False
        for packs, uses_disk in packings([kind.unit for kind in units], self.plan, is_cpu=self.machine.is_cpu):
            if uses_disk and fits:
                break
            kinds = [replace(kind, unit=pack_unit(kind.unit, packs=packs)) for kind in units]
            choice = StateChoice(kinds, self.options, uses_disk=uses_disk)
            groups = [*choice.groups(), *activations]
            solution = solve_program(build_program(groups, self.setup, left, self.base), cutoff, max_nodes)
            fits = fits or solution is not None
            if solution is not None and solution.value < cutoff:
                best = self._read(solution, choice, groups, blocks, packs)
                cutoff = less_than(best.cost)
        return best

    def _units(self, gathers: bool) -> list[UnitsAlike]:
        """What one rank keeps of every unit; without gathering, open weights are on the device."""
        plan = self.plan if gathers or self.plan.weights is not None else replace(self.plan, weights="device")
        kinds = find_rank_parts(self.footprint.parts, plan, self.setup.pipeline).kinds
        return [
            UnitsAlike(unit_bytes(kind.part, self.footprint, self.setup), kind.fixed, kind.positions) for kind in kinds
        ]

    def _blocks(self, recomputes: bool) -> list[tuple[UnitFootprint, tuple[str, ...], list[int]]]:
        """Blocks of equal cost by position, with the policies they may have."""
        alike: dict[tuple[Cost, tuple[str, ...]], list[PartsAlike]] = {}
        for kind in self.rank.kinds:
            if kind.part.is_block:
                policies = (kind.policy,) if kind.policy is not None else POLICIES if recomputes else ("keep",)
                alike.setdefault((kind.part.cost, policies), []).append(kind)
        return [
            (found[0].part, policies, sorted(position for kind in found for position in kind.positions))
            for (_, policies), found in alike.items()
        ]

    def _activation_groups(self, blocks: Sequence[tuple[UnitFootprint, tuple[str, ...], list[int]]]) -> list[Group]:
        return [
            Group(part.name, len(positions), tuple(self._activation_option(part, policy) for policy in policies))
            for part, policies, positions in blocks
        ]

    def _activation_option(self, part: UnitFootprint, policy: str) -> Option:
        key = (part.cost, policy)
        if key not in self._activation_options:
            loads, held = activation_loads(part, policy, self.machine, self.setup)
            burden = 1e-6 * sum(loads.seconds)
            self._activation_options[key] = Option((policy,), tuple(loads.seconds), activation_moments(held), burden)
        return self._activation_options[key]

    def _read(
        self,
        solution: Solution,
        choice: StateChoice,
        groups: Sequence[Group],
        blocks: Sequence[tuple[UnitFootprint, tuple[str, ...], list[int]]],
        packs: bool,
    ) -> _Chosen:
        lanes = list(self.base)
        for group, counts in zip(groups, solution.counts, strict=True):
            for option, count in zip(group.options, counts, strict=True):
                if count:
                    lanes = [have + count * more for have, more in zip(lanes, option.seconds, strict=True)]
        policies = _spread(blocks, solution.counts[len(choice.members) :])
        return _Chosen(solution.value, tuple(lanes), choice.places(solution), policies, packs)

    def candidate(self, found: _Chosen) -> Candidate:
        tokens = self.setup.tokens * self.setup.accumulate * self.setup.data
        flops = tokens * self.footprint.flops(self.setup.sequence)
        parts = self.rank.parts
        prediction = Prediction(self.setup, self.machine, found.lanes, flops, self._held(found))
        return Candidate(
            self.footprint,
            self.setup,
            self.setup.state_format,
            begin_in_backward(prediction, [self._parts_in_backward(found)]),
            tuple((part.name, where) for part, where in zip(parts, found.places, strict=True)),
            tuple((parts[position].module_name, policy) for position, policy in found.policies),
            self.room,
            found.cost,
            found.packs,
            self._capacity(),
        )

    def _parts_in_backward(self, found: _Chosen) -> list[Move]:
        """What updates in host memory save in the forward, and add to the backward, if they are in two parts."""
        states, is_compact = self.footprint.states, self.setup.state_format == "compact"
        if not self.request.updates_in_parts or self.machine.is_cpu or not self.setup.hides_updates or is_compact:
            return []
        seconds = self.machine.devices / (self.machine.update_rate(self.setup.state_format) + stream_rate(self.machine))
        has_master = states.weights == 2 and not states.remainder  # among the states
        moves: list[Move] = []
        for kind in self.rank.kinds:
            unit = unit_bytes(kind.part, self.footprint, self.setup)
            gradient = updated_from(unit, self.setup)
            master = 2 * unit.updated_weights if has_master else 0
            touched = Touched(unit.updated_weights + unit.remainder + master, unit.optimizer - master, gradient)
            places = [found.places[position] for position in kind.positions]
            num_on_host = sum({where.weights, where.gradients, where.optimizer} == {"host"} for where in places)
            moves += [touched.in_two_parts().times(seconds)] * num_on_host
        return moves

    def _capacity(self) -> Capacity | None:
        """For a model with more such blocks, which run again one at a time. Below stage 3 each rank has all weights."""
        if self.setup.stage < 3:
            return None
        working = max(working_bytes(self.footprint, self.setup, gathered=self.footprint.parts, recomputes=True))
        ranks, plan = self.setup.data * self.setup.model_ranks, self.request.plan
        return capacity_of(
            self.footprint,
            rooms(self.machine, plan, ranks),
            working=working,
            num_ranks=ranks,
            keeps_gradients=plan.keeps_gradients,
            may_drop=plan.may_drop_gradients and self.setup.pipeline == 1,
            packs=may_pack(plan, is_cpu=self.machine.is_cpu),
            buffers=self.request.buffer_bytes,
        )

    def _held(self, found: _Chosen) -> dict[str, dict[str, float]]:
        """Bytes by tier and kind; for the device, when it holds the most."""
        turn, end = self._at("turn", found), self._at("end", found)
        held = turn if sum(turn["device"].values()) >= sum(end["device"].values()) else end
        if self.request.buffer_bytes and any(held[tier] for tier in TIERS[1:]):
            held["host"]["buffers"] = float(self.request.buffer_bytes)
        return held

    def _at(self, moment: str, found: _Chosen) -> dict[str, dict[str, float]]:
        held: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}

        def add(tier: str, kind: str, num_bytes: float) -> None:
            if num_bytes:
                held[tier][kind] = held[tier].get(kind, 0.0) + num_bytes

        policies, again = dict(found.policies), self.setup.accumulate > 1
        for kind in self.rank.kinds:
            unit = pack_unit(unit_bytes(kind.part, self.footprint, self.setup), packs=found.packs)
            for where, count in Counter(found.places[position] for position in kind.positions).items():
                add(where.weights, "weights", count * unit.size("weights", where.weights))
                add(where.optimizer, "optimizer", count * unit.optimizer)
                add(where.remainder, "optimizer", count * unit.remainder)
                if where.gradients != "device":
                    add(where.gradients, "gradients", count * unit.size("gradients", where.gradients, is_summed=again))
                elif again or moment == "end":
                    add("device", "gradients", count * (unit.summed_gradients if again else unit.gradients))
            if kind.part.is_block:
                for policy, count in Counter(policies[position] for position in kind.positions).items():
                    for tier, taken in activation_loads(kind.part, policy, self.machine, self.setup)[1].items():
                        if tier != "device" or moment == "turn":
                            add(tier, "activations", count * taken)
        recomputes = any(policy != "keep" for policy in policies.values())
        gathered = [
            part
            for part, where in zip(self.rank.parts, found.places, strict=True)
            if where.weights != "device" or (self.setup.stage == 3 and self.setup.data > 1)
        ]
        working = working_bytes(self.footprint, self.setup, gathered=gathered, recomputes=recomputes)
        add("device", "working memory", working[moment == "end"])
        return held


def _spread(
    blocks: Sequence[tuple[UnitFootprint, tuple[str, ...], list[int]]], counts: Sequence[Sequence[int]]
) -> tuple[tuple[int, str], ...]:
    """Policies by position. The last blocks keep, because what they keep is freed first."""
    chosen: list[tuple[int, str]] = []
    for (_, policies, positions), numbers in zip(blocks, counts, strict=True):
        spread = [policy for policy, count in zip(policies, numbers, strict=True) for _ in range(count)]
        chosen += zip(positions, reversed(spread), strict=True)
    return tuple(chosen)
