"""The choice of a plan as an integer program: which option for how many of each group of equal things.

A step is phases one after the other, and a phase takes as long as its slowest lane. Each option adds seconds to lanes
and bytes to tiers, so the time of a step is a sum of maxima of linear functions of the counts: if counts need not
be whole, it is a linear program, whose value no placement can beat. Branching on counts that are not whole closes
the gap (`solve_program`): exactly for few things; for many, it ends within a thousandth of the bound or after
`MAX_NODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unbounded.planner.linear.simplex import minimize

MAX_NODES, NODES_OF_MANY = 400, 40
# How far from the bound a choice may be: for few things not at all, for many a thousandth.
FEW_THINGS, EXACT_GAP, CLOSE_GAP = 12, 1e-7, 1e-3
# A relaxed program: its value, its counts, and the bounds on them.
Node = tuple[float, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Option:
    """One way to have a thing: seconds by lane, bytes by tier, and what is preferred among equally fast ones."""

    label: tuple[str, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    burden: float = 0.0


@dataclass(frozen=True)
class Group:
    """`count` equal things, each with one of `options`."""

    name: str
    count: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Phase:
    """A stretch of a step that takes as long as the slowest of its lanes (indices into an option's seconds)."""

    repeats: float
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """What to choose, `base` seconds per lane that no choice changes, and the room in each tier.

    Arrays and values are in a unit of time in which no number is tiny: seconds times `scale`.
    """

    groups: tuple[Group, ...]
    phases: tuple[Phase, ...]
    base: tuple[float, ...]
    room: tuple[float, ...]

    @cached_property
    def scale(self) -> float:
        """One over the seconds of the largest thing."""
        most = max([sum(self.base), *(sum(option.seconds) for _, option in self.options)], default=0.0)
        return 1.0 / most if most else 1.0

    @cached_property
    def options(self) -> list[tuple[int, Option]]:
        return [(index, option) for index, group in enumerate(self.groups) for option in group.options]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Lanes by options."""
        seconds = np.array([option.seconds for _, option in self.options], dtype=float)
        return self.scale * seconds.reshape(-1, len(self.base)).T

    @cached_property
    def base_lanes(self) -> np.ndarray:
        return self.scale * np.array(self.base, dtype=float)

    @cached_property
    def owners(self) -> np.ndarray:
        """Groups by options: 1 where an option is the group's."""
        owners = np.zeros((len(self.groups), len(self.options)))
        owners[[group for group, _ in self.options], range(len(self.options))] = 1.0
        return owners

    @cached_property
    def bytes(self) -> np.ndarray:
        """Tiers by options."""
        return np.array([option.bytes for _, option in self.options], dtype=float).reshape(-1, len(self.room)).T

    @cached_property
    def deciding(self) -> list[list[int]]:
        """For each phase, the lanes that a choice changes, and the slowest of the others."""
        changed = [bool(row.any()) for row in self.seconds]
        found = []
        for phase in self.phases:
            still = [lane for lane in phase.lanes if not changed[lane]]
            slowest = [max(still, key=lambda lane: self.base[lane])] if still else []
            found.append([lane for lane in phase.lanes if changed[lane]] + slowest)
        return found

    @cached_property
    def most(self) -> list[float]:
        """What each tier takes at most, whatever is chosen."""
        tiers = range(len(self.room))
        return [sum(group.count * max(o.bytes[t] for o in group.options) for group in self.groups) for t in tiers]

    @cached_property
    def least(self) -> list[float]:
        """What each tier takes at least."""
        tiers = range(len(self.room))
        return [sum(group.count * min(o.bytes[t] for o in group.options) for group in self.groups) for t in tiers]

    @cached_property
    def burdens(self) -> np.ndarray:
        return self.scale * np.array([option.burden for _, option in self.options], dtype=float)

    @cached_property
    def root(self) -> Node | None:
        """The program with counts that need not be whole; None if there is no room."""
        if any(least > room for least, room in zip(self.least, self.room, strict=True)):
            return None
        low, high = np.zeros(len(self.options)), np.full(len(self.options), np.inf)
        solved = _relax(self, low, high)
        return None if solved is None else (*solved, low, high)

    def fits(self, counts: np.ndarray) -> bool:
        return bool(np.all(self.bytes @ counts <= np.array(self.room) + 1e-6))

    def value(self, counts: np.ndarray) -> float:
        """Seconds of a step, and a little for what is preferred among equals."""
        lanes = self.base_lanes + self.seconds @ counts
        taken = sum(phase.repeats * max(lanes[list(phase.lanes)]) for phase in self.phases)
        return float(taken + self.burdens @ counts)


@dataclass(frozen=True)
class Solution:
    """Counts by group and option, and seconds with what is preferred; `bound` is what no choice can beat."""

    counts: tuple[tuple[int, ...], ...]
    value: float
    bound: float


def solve_program(program: Program, cutoff: float = np.inf, max_nodes: int = MAX_NODES) -> Solution | None:
    """The best choice of `max_nodes` (or the first found after); None if nothing fits.

    Where the bound shows that no choice beats `cutoff` seconds, it is the first that was found.
    Deterministic: it counts nodes, not time.
    """
    if program.root is None:
        return None
    best: tuple[float, np.ndarray] | None = None
    is_small = sum(group.count for group in program.groups) <= FEW_THINGS
    gap, max_nodes = (EXACT_GAP, max_nodes) if is_small else (CLOSE_GAP, min(max_nodes, NODES_OF_MANY))
    if program.root[0] >= cutoff * program.scale:
        max_nodes = 0
    open_nodes: list[Node] = [program.root]
    for number in range(MAX_NODES):
        if not open_nodes or (best is not None and number >= max_nodes):
            break
        index = min(range(len(open_nodes)), key=lambda i: open_nodes[i][0]) if best else len(open_nodes) - 1
        node = open_nodes.pop(index)
        bound, relaxed, low, high = node
        if best is not None and bound >= best[0] - gap * abs(best[0]):
            continue
        for slack in (1e-9, -1e-6):  # one byte too many shows only in counts that are almost whole
            rounded = _round(program, np.floor(relaxed + slack).clip(low, None))
            if rounded is not None and (best is None or program.value(rounded) < best[0]):
                best = (program.value(rounded), rounded)
        is_enough = best is not None and not max_nodes
        open_nodes += [node] if is_enough else _branch(program, relaxed, low, high)
    if best is None:
        return None
    bounds = [node[0] for node in open_nodes]
    return Solution(_split(program, best[1]), best[0] / program.scale, min([best[0], *bounds]) / program.scale)


def _branch(program: Program, relaxed: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[Node]:
    """The two halves around the count that is furthest from whole; none if all are whole."""
    distance = np.abs(relaxed - np.round(relaxed))
    index = int(np.argmax(distance))
    if distance[index] < 1e-9:
        return []
    nodes: list[Node] = []
    for is_upper in (True, False):
        new_low, new_high = low.copy(), high.copy()
        if is_upper:
            new_low[index] = np.ceil(relaxed[index])
        else:
            new_high[index] = np.floor(relaxed[index])
        solved = _relax(program, new_low, new_high)
        if solved is not None:
            nodes.append((solved[0], solved[1], new_low, new_high))
    return sorted(nodes, key=lambda node: -node[0])


def _relax(program: Program, low: np.ndarray, high: np.ndarray) -> tuple[float, np.ndarray] | None:
    """The linear program within bounds on the counts: its value and counts, or None if it cannot be met.

    Variables are the counts above `low`, and one for each phase that is at least each of its lanes.
    """
    num_options, num_phases = len(program.options), len(program.phases)
    base = program.base_lanes + program.seconds @ low
    left = np.array(program.room) - program.bytes @ low
    totals = np.array([group.count for group in program.groups], dtype=float) - program.owners @ low
    if np.any(left < -1e-6 * np.maximum(1.0, np.abs(program.room))) or np.any(totals < -1e-9):
        return None
    lanes = [(number, lane) for number, lanes in enumerate(program.deciding) for lane in lanes]
    tiers = [tier for tier in range(len(left)) if program.most[tier] > program.room[tier]]  # in others anything fits
    capped = np.flatnonzero(np.isfinite(high))
    rows = np.zeros((len(lanes) + len(tiers) + len(capped), num_options + num_phases))
    bounds = np.zeros(len(rows))
    for row, (number, lane) in enumerate(lanes):
        rows[row, :num_options], rows[row, num_options + number] = program.seconds[lane], -1.0
        bounds[row] = -base[lane]
    for row, tier in enumerate(tiers, start=len(lanes)):
        scale = 1.0 / max(1.0, float(np.max(np.abs(program.bytes[tier]), initial=0.0)))
        rows[row, :num_options], bounds[row] = program.bytes[tier] * scale, max(0.0, left[tier] * scale)
    for row, index in enumerate(capped, start=len(lanes) + len(tiers)):
        rows[row, index], bounds[row] = 1.0, high[index] - low[index]
    equal = np.hstack([program.owners, np.zeros((len(program.groups), num_phases))])
    costs = np.concatenate([program.burdens, [phase.repeats for phase in program.phases]])
    solved = minimize(costs, rows, bounds, equal, totals)
    if solved is None:
        return None
    return solved[0] + float(program.burdens @ low), solved[1][:num_options] + low


def _round(program: Program, counts: np.ndarray) -> np.ndarray | None:
    """Whole counts: rounds down, and puts each remaining thing where it costs least."""
    for number, group in enumerate(program.groups):
        own = np.flatnonzero(program.owners[number])
        for _ in range(group.count - int(counts[own].sum())):
            choices = []
            for index in own:
                counts[index] += 1
                if program.fits(counts):
                    choices.append((program.value(counts), int(index)))
                counts[index] -= 1
            if not choices:
                return None
            counts[min(choices)[1]] += 1
    return counts if program.fits(counts) else None


def _split(program: Program, counts: np.ndarray) -> tuple[tuple[int, ...], ...]:
    parts: list[list[int]] = [[] for _ in program.groups]
    for (group, _), count in zip(program.options, counts, strict=True):
        parts[group].append(round(float(count)))
    return tuple(map(tuple, parts))
