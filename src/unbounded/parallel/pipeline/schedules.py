"""Pipeline schedules as data: what each rank does with which micro-batch, in order. Pure.

    gpipe        all forwards, then all backwards
    1f1b         as many forwards as there are later stages, then one backward for each forward
    interleaved  1f1b over several chunks of layers per rank: the bubble is that many times smaller
    zero_bubble  1f1b with backwards in two halves; the second, for weights, fills idle time

A *stage* is a contiguous run of blocks. With `chunks` chunks per rank, stage number s lives on rank s % ranks, as its
chunk s // ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unbounded.errors import PlanError


class PassKind(Enum):
    """What is done with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUTS = "I"  # the half of a backward that others wait for
    WEIGHTS = "W"  # the other half


@dataclass(frozen=True)
class Action:
    """One piece of work on one micro-batch in one of the rank's chunks."""

    work: PassKind
    chunk: int
    micro: int

    def __repr__(self) -> str:
        return f"{self.work.value}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


def check_schedule(schedule: str, num_ranks: int, num_micros: int) -> None:
    """Raises if a schedule cannot run with so many micro-batches."""
    if schedule != "gpipe" and num_micros < num_ranks:
        raise PlanError(
            f"microbatches={num_micros} are too few for the schedule {schedule!r} over pipeline={num_ranks}: some "
            f"stages would never work at the same time. Use at least {num_ranks}, or the schedule 'gpipe'."
        )
    if schedule == "interleaved" and num_micros % num_ranks:
        raise PlanError(
            f"microbatches={num_micros} do not divide by pipeline={num_ranks}, which the schedule 'interleaved' needs. "
            f"Use {num_micros // num_ranks * num_ranks} or {-(-num_micros // num_ranks) * num_ranks}."
        )


def make_schedule(schedule: str, rank: int, num_ranks: int, num_micros: int, chunks: int = 1) -> list[Action]:
    """What `rank` does, in order."""
    if schedule == "gpipe":
        micros = range(num_micros)
        return [Action(PassKind.FORWARD, 0, i) for i in micros] + [Action(PassKind.BACKWARD, 0, i) for i in micros]
    if schedule == "interleaved":
        return _interleaved(rank, num_ranks, num_micros, chunks)
    ahead = min(num_ranks - rank - 1, num_micros)
    forwards = [Action(PassKind.FORWARD, 0, i) for i in range(num_micros)]
    backwards = [Action(PassKind.BACKWARD, 0, i) for i in range(num_micros)]
    order = _alternate(forwards, backwards, ahead)
    return _split_backwards(order, rank) if schedule == "zero_bubble" else order


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order, steady = list(forwards[:ahead]), len(forwards) - ahead
    for forward, backward in zip(forwards[ahead:], backwards[:steady], strict=True):
        order += [forward, backward]
    return order + list(backwards[steady:])


def _interleaved(rank: int, num_ranks: int, num_micros: int, chunks: int) -> list[Action]:
    """Micro-batches go through the chunks in groups of as many as there are ranks."""
    group, total = num_ranks * chunks, num_micros * chunks

    def place(number: int) -> tuple[int, int]:
        return number % group // num_ranks, number // group * num_ranks + number % num_ranks

    forwards = [Action(PassKind.FORWARD, *place(number)) for number in range(total)]
    backwards = [Action(PassKind.BACKWARD, chunks - 1 - chunk, micro) for chunk, micro in map(place, range(total))]
    ahead = min((num_ranks - rank - 1) * 2 + (chunks - 1) * num_ranks, total)
    return _alternate(forwards, backwards, ahead)


def _split_backwards(order: Sequence[Action], rank: int) -> list[Action]:
    """Halves of backwards; those for weights come `rank` actions later, so that earlier stages need not wait."""
    halves: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        if action.work is not PassKind.BACKWARD:
            halves.append(action)
            continue
        halves.append(Action(PassKind.INPUTS, action.chunk, action.micro))
        waiting.append(Action(PassKind.WEIGHTS, action.chunk, action.micro))
        if len(waiting) > rank:
            halves.append(waiting.pop(0))
    return halves + waiting


def simulate(orders: Sequence[Sequence[Action]], seconds: dict[PassKind, float], chunks: int = 1) -> float:
    """How long all ranks take if only computing costs time and every rank does its `orders` as early as it can."""
    num_ranks = len(orders)
    last = num_ranks * chunks - 1
    done: dict[tuple[PassKind, int, int], float] = {}
    clocks, positions = [0.0] * num_ranks, [0] * num_ranks
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                stage = action.chunk * num_ranks + rank
                needed = _needs(action, stage, last)
                if any(key not in done for key in needed):
                    break
                start = max([clocks[rank], *(done[key] for key in needed)])
                clocks[rank] = start + seconds[action.work]
                kind = PassKind.BACKWARD if action.work is PassKind.INPUTS else action.work
                done[kind, stage, action.micro] = clocks[rank]
                positions[rank] += 1
                moved = True
        if not moved:
            raise PlanError("the ranks of the schedule wait for each other in a circle.")
    return max(clocks)


def _needs(action: Action, stage: int, last: int) -> list[tuple[PassKind, int, int]]:
    """The work that must be done before this, in neighbouring stages and in this one."""
    if action.work is PassKind.FORWARD:
        return [(PassKind.FORWARD, stage - 1, action.micro)] if stage else []
    if action.work is PassKind.WEIGHTS:
        return [(PassKind.BACKWARD, stage, action.micro)]
    before = [(PassKind.FORWARD, stage, action.micro)]
    return before if stage == last else [*before, (PassKind.BACKWARD, stage + 1, action.micro)]
