"""A step in which the host begins its updates inside the backward (docs/design/early-updates.md).

    first forward   without the updates that drafts have done
    backward        with the drafts, and with the states of those that had only the weights

Drafts that make a step longer are left out, as a run finds by itself (`zero.step.early`). With several micro-batches
they run in the last backward; here each has its part of them, which is short where the host sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from unbounded.planner.step.loads import LANES, PHASES
from unbounded.planner.step.prediction import Prediction


def begin_in_backward(prediction: Prediction, everything: Sequence[float], weights: Sequence[float]) -> Prediction:
    """The shortest of a step without drafts and with some. Both lists have seconds that the host's updates of units
    take: those that may draft everything, and those that may draft their weights, in the order of the backward."""
    drafted = sum(everything)
    options = [_shift(prediction, drafted + more, drafted + 2 * more) for more in accumulate(weights, initial=0.0)]
    return min([prediction, *options], key=lambda option: option.seconds)


def _shift(prediction: Prediction, saved: float, added: float) -> Prediction:
    lanes = list(prediction.lanes)
    for phase, seconds in (("first forward", -saved), ("backward", added / prediction.setup.passes)):
        lanes[PHASES.index(phase) * len(LANES) + LANES.index("host memory")] += seconds
    return replace(prediction, lanes=tuple(lanes))
