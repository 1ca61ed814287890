"""Where every kind of state of every unit lives: `solve`, one pure function of sizes, budget, plan and machine.

What the plan leaves open goes where the step is predicted to be shortest (`loads`, `program`). Rules rule out what
cannot be best:

- weights, which every pass reads, are never on a slower tier than the moments of their unit, which a step reads once;
- gradients are where the optimizer states are updated (on the host for those on disk), unless the plan says otherwise;
  they are nowhere only if it says so, because that is a promise about the loop;
- weights and gradients go to disk only if device and host cannot hold them all, because moments free more memory per
  byte of traffic (8 bytes for 16, weights 2 for 6, gradients 2 for 8). Before that, frozen ones are packed;
- work of host, disk and links counts a little even when it is hidden; among equals, the one that takes the least of
  the device wins, because activations can use it. The first units get the fastest places: the next forward needs them
  first. Only weights on disk are spread over the model, because passes read one unit while they use those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul

from unbounded.errors import BudgetError
from unbounded.planner.linear.program import Group, Option, Phase, Program, Solution, solve_program
from unbounded.planner.machine import MachineRates
from unbounded.planner.plan import TIERS, Plan
from unbounded.planner.sizes import format_bytes
from unbounded.planner.step.loads import LANES, PHASES, Setup, place_loads, repeats
from unbounded.planner.step.peaks import place_bytes
from unbounded.planner.unit_bytes import (
    KINDS,
    Budget,
    UnitBytes,
    UnitPlace,
    fixed_tiers,
    pack_unit,
    packings,
    use_of,
)

# What a second of a lane counts even when it is hidden: it takes memory bandwidth from the others (during copies both
# ways the host's optimizer keeps 80 % of its rate), and a prediction is not exact.
HIDDEN_COSTS = {"host memory": 0.05, "disk": 0.05, "to device": 0.01, "to host": 0.01}
# Device memory counts too, but only enough to break ties.
HELD_COST = 1e-6
# The last of so many equal parts of the units have no weights on disk, unless nearly all have.
LAST_PART = 6


@dataclass(frozen=True)
class Solved:
    """A placement that fits, and the room it was made for."""

    places: tuple[UnitPlace, ...]
    room: Mapping[str, int]
    packs: bool = False  # whether frozen weights outside the device are packed


@dataclass(frozen=True)
class Shortage:
    """Nothing fits: what each tier is short of, and what would help."""

    states_bytes: int
    short: Mapping[str, int]
    spare: int
    budget: Budget
    gradients_bytes: int = 0  # part of the states that gradients="none" would not store
    is_placed: bool = True  # the plan says where some of the states go

    def error(self, what: str = "the states") -> BudgetError:
        facts = ", ".join(
            f"{tier} is short by {format_bytes(missing)} of its {format_bytes(getattr(self.budget, tier))}"
            for tier, missing in self.short.items()
        )
        missing = sum(self.short.values())
        if self.spare >= missing and self.is_placed:
            remedy = 'The other tiers have room: leave the placement to plan="auto", or place fewer units there.'
        elif self.spare >= missing:
            remedy = (
                f"The other tiers have {format_bytes(self.spare)} left, but not in one piece for what a unit puts on "
                f"a tier. Raise a budget by {format_bytes(missing)}."
            )
        else:
            remedy = (
                f"Raise a budget by {format_bytes(missing - self.spare)} (disk_bytes with disk_path on a larger disk "
                'is the cheapest), use more ranks, or optimizer_format="compact".'
            )
        if self.gradients_bytes:
            remedy += (
                ' Without clipping and with one backward per step, gradients="none" takes '
                f"{format_bytes(self.gradients_bytes)} less."
            )
        taken = format_bytes(self.states_bytes)
        return BudgetError(f"{what} take {taken} on this rank and do not fit: {facts}. {remedy}")


def solve(
    units: Sequence[UnitBytes], budget: Budget, plan: Plan, machine: MachineRates, setup: Setup | None = None
) -> Solved | Shortage:
    """The fastest placement of the units on one rank within `budget`. What `plan` fixes stays."""
    setup = setup or Setup(stage=plan.stage)
    for room in budget.rooms:
        solved = _place(units, room, plan, machine, setup)
        if solved is not None:
            return solved
    return _shortage(units, budget, plan, machine, setup)


def _place(
    units: Sequence[UnitBytes], room: Mapping[str, int], plan: Plan, machine: MachineRates, setup: Setup
) -> Solved | None:
    """Tries first without and then with weights and gradients on disk, and packs frozen weights in between."""
    options = PlaceOptions(machine, setup)
    for packs, uses_disk in packings(units, plan, is_cpu=machine.is_cpu):
        kinds = find_alike([pack_unit(unit, packs=packs) for unit in units], plan)
        choice = StateChoice(kinds, options, uses_disk=uses_disk)
        solution = solve_program(choice.program(room))
        if solution is not None:
            return Solved(choice.places(solution), room, packs)
    return None


@dataclass(frozen=True)
class UnitsAlike:
    """Units of one rank with the same bytes, by position, and the tiers that the plan fixes for them."""

    unit: UnitBytes
    fixed: tuple[tuple[str, str], ...]
    positions: tuple[int, ...]


def find_alike(units: Sequence[UnitBytes], plan: Plan) -> list[UnitsAlike]:
    alike: dict[tuple[tuple[int | None, ...], tuple[tuple[str, str], ...]], list[int]] = {}
    for position, unit in enumerate(units):
        alike.setdefault((unit.sizes, tuple(fixed_tiers(unit.name, plan).items())), []).append(position)
    return [UnitsAlike(units[found[0]], fixed, tuple(found)) for (_, fixed), found in alike.items()]


class PlaceOptions:
    """What places of units add to lanes and tiers in one setup, each computed once."""

    def __init__(
        self,
        machine: MachineRates,
        setup: Setup,
        take: Callable[[UnitBytes, UnitPlace], tuple[float, ...]] = place_bytes,
    ) -> None:
        self.machine, self.setup, self.take = machine, setup, take
        times = repeats(setup)
        self._hidden_costs = [times[phase] * HIDDEN_COSTS.get(lane, 0.0) for phase in PHASES for lane in LANES]
        self._found: dict[tuple[tuple[int | None, ...], UnitPlace], Option] = {}

    def option(self, unit: UnitBytes, where: UnitPlace) -> Option:
        key = (unit.sizes, where)
        if key not in self._found:
            self._found[key] = self._compute(unit, where)
        return self._found[key]

    def _compute(self, unit: UnitBytes, where: UnitPlace) -> Option:
        seconds = place_loads(unit, where, self.machine, self.setup).seconds
        burden = sum(map(mul, self._hidden_costs, seconds))
        taken = self.take(unit, where)
        held = HELD_COST * taken[0] / self.machine.device_bandwidth
        label = (where.weights, where.gradients, where.optimizer)
        return Option(label, tuple(seconds), taken, burden + held)


class StateChoice:
    """The units of one rank as groups of equal ones, each with the places it may have."""

    def __init__(self, kinds: Sequence[UnitsAlike], options: PlaceOptions, *, uses_disk: bool) -> None:
        self.options = options
        alike: dict[tuple[tuple[int | None, ...], tuple[UnitPlace, ...]], list[UnitsAlike]] = {}
        for kind in kinds:
            alike.setdefault((kind.unit.sizes, candidates(kind, uses_disk=uses_disk)), []).append(kind)
        self.members = [
            (found[0].unit, places, sorted(position for kind in found for position in kind.positions))
            for (_, places), found in alike.items()
        ]

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(unit.name, len(positions), tuple(self.options.option(unit, where) for where in places))
            for unit, places, positions in self.members
        )

    def program(self, room: Mapping[str, float]) -> Program:
        return build_program(self.groups(), self.options.setup, [room[tier] for tier in TIERS], base=None)

    def places(self, solution: Solution) -> tuple[UnitPlace, ...]:
        """Units in order, the fastest places first; those whose weights are on disk among the others."""
        chosen: dict[int, UnitPlace] = {}
        for (_, places, positions), counts in zip(self.members, solution.counts, strict=False):
            spread = [where for where, count in zip(places, counts, strict=True) for _ in range(count)]
            chosen.update(zip(positions, spread_disk(spread), strict=True))
        return tuple(chosen[position] for position in range(len(chosen)))


def spread_disk(places: Sequence[UnitPlace]) -> list[UnitPlace]:
    """Moves places with weights on disk apart: passes read one while they use the units before it. The last units have
    none, because a backward begins there with a full device and has no room to read ahead."""
    slow = [where for where in places if where.weights == "disk"]
    order = [where for where in places if where.weights != "disk"]
    num_spread = len(places) - len(places) // LAST_PART
    for index, where in enumerate(slow):
        order.insert((2 * index + 1) * num_spread // (2 * len(slow)), where)
    return order


def build_program(
    groups: Sequence[Group], setup: Setup, room: Sequence[float], base: Sequence[float] | None
) -> Program:
    """The program of the groups with phases and rooms."""
    width, counts = len(LANES), repeats(setup)
    phases = tuple(
        Phase(counts[name], tuple(range(index * width, (index + 1) * width)))
        for index, name in enumerate(PHASES)
        if counts[name]
    )
    return Program(tuple(groups), phases, tuple(base or [0.0] * (len(PHASES) * width)), tuple(map(float, room)))


def candidates(kind: UnitsAlike, *, uses_disk: bool) -> tuple[UnitPlace, ...]:
    """The places that a unit may have, the fastest first."""
    is_frozen = not kind.unit.optimizer and not kind.unit.gradients
    return _menu(kind.fixed, is_frozen, uses_disk)


@cache
def _menu(fixed_pairs: tuple[tuple[str, str], ...], is_frozen: bool, uses_disk: bool) -> tuple[UnitPlace, ...]:
    fixed, found = dict(fixed_pairs), []
    for optimizer in _open(fixed, "optimizer", TIERS):
        for weights in _open(fixed, "weights", TIERS if uses_disk else TIERS[:2]):
            if is_frozen and "optimizer" not in fixed and optimizer != weights:
                continue
            if not fixed.keys() & {"weights", "optimizer"} and TIERS.index(optimizer) < TIERS.index(weights):
                continue
            follows = (optimizer,) if optimizer != "disk" else ("host", "disk") if uses_disk else ("host",)
            if is_frozen:
                follows = (weights,)
            for gradients in _open(fixed, "gradients", follows):
                found.append(UnitPlace(weights, gradients, optimizer))
    return tuple(found)


def _open(fixed: Mapping[str, str], kind: str, tiers: Sequence[str]) -> Sequence[str]:
    return (fixed[kind],) if kind in fixed else tiers


def _shortage(units: Sequence[UnitBytes], budget: Budget, plan: Plan, machine: MachineRates, setup: Setup) -> Shortage:
    """What is missing, found by giving tiers more room: the disk first, as the cheapest."""
    room = budget.rooms[-1]
    for extended in (("disk",), ("host", "disk"), ("device",), TIERS):
        wide = {tier: 2**60 if tier in extended else max(0, room[tier]) for tier in TIERS}
        solved = _place(units, wide, plan, machine, setup)
        if solved is not None:
            break
    assert solved is not None
    use: Counter[str] = Counter()
    for unit, where in zip(units, solved.places, strict=True):
        use += use_of(pack_unit(unit, packs=solved.packs), {kind: getattr(where, kind) for kind in KINDS})
    short = {tier: use[tier] - room[tier] for tier in TIERS if use[tier] > room[tier]}
    spare = sum(max(0, room[tier] - use[tier]) for tier in TIERS)
    stored = sum(unit.gradients for unit in units) if plan.keeps_gradients else 0
    total = stored + sum(sum(use_of(unit, {"weights": "device", "optimizer": "device"}).values()) for unit in units)
    is_placed = any(getattr(plan, kind) is not None for kind in KINDS)
    return Shortage(total, short, spare, budget, stored, is_placed)
