"""A step whose host updates what it can inside the backward (docs/design/early-updates.md).

    first forward   without the updates that drafts have done, and without the moments of units in two parts
    backward        with the drafts, with the states of those that had only the weights, and with those moments

What makes a step longer is left out, as a run finds by itself (`zero.step.early`). With several micro-batches drafts
are written in the last backward and moments in the first ones; here each backward has its part of both, which is short
where the host sets the pace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from unbounded.planner.step.loads import LANES, PHASES
from unbounded.planner.step.prediction import Prediction


@dataclass(frozen=True)
class Touched:
    """The bytes of one unit that its update on the host reads: of the master, of the moments, of the gradient."""

    master: float
    moments: float
    gradient: float

    @property
    def whole(self) -> float:
        return 2 * (self.master + self.moments) + self.gradient

    @property
    def moments_later(self) -> float:
        """What an update of the moments reads and writes after one of the weights."""
        return 2 * self.moments + self.gradient

    def draft(self, *, has_states: bool, weights: float) -> Move:
        """A draft. With nothing but `weights` in it, the states are updated afterwards, as if there were none."""
        later = 0 if has_states else self.master + self.moments + self.gradient + weights
        return Move(self.whole, self.whole + later)

    def in_two_parts(self) -> Move:
        """Its weights in the forward, and its moments in the backward."""
        return Move(self.moments, self.moments_later)


@dataclass(frozen=True)
class Move:
    """What is taken off the first forward, and added to the backward: bytes of host memory, or seconds."""

    saved: float
    added: float

    def times(self, factor: float) -> Move:
        return Move(self.saved * factor, self.added * factor)

    def __add__(self, other: Move) -> Move:
        return Move(self.saved + other.saved, self.added + other.added)


def begin_in_backward(prediction: Prediction, moves: Sequence[Iterable[Move]]) -> Prediction:
    """The shortest step of those with none of these moves, in seconds, or with the first ones of each sort."""
    for sort in moves:
        options = [_shift(prediction, move) for move in accumulate(sort)]
        prediction = min([prediction, *options], key=lambda option: option.seconds)
    return prediction


def _shift(prediction: Prediction, move: Move) -> Prediction:
    lanes = list(prediction.lanes)
    for phase, seconds in (("first forward", -move.saved), ("backward", move.added / prediction.setup.passes)):
        lanes[PHASES.index(phase) * len(LANES) + LANES.index("host memory")] += seconds
    return replace(prediction, lanes=tuple(lanes))
