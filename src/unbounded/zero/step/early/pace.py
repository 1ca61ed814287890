"""How much is written in a backward: as much as the update lane has time for.

A forward waits for updates, and while a backward runs the lane is idle. Two things move work there, and both add some:

- A draft of new weights alone, whose states are updated later: the forward does not wait for the unit at all.
- A unit whose weights are updated in the forward, and whose moments after it: the forward waits for two thirds of an
  update. This needs no guess and no memory, so it is what steps have that clip, and what the others have once there is
  no memory for another draft.

Either is free while the lane would be idle. But when the lane is always busy, steps take as long as its work, and each
makes them longer. In between is the number with which steps are shortest: where the lane is idle for about as long as
one or two updates take it. It is less where the next gradient of a unit comes before the lane has made its moments, as
in a model whose first blocks are on the device: those who wait for moments lose what the forward has won. `Comparison`
then tells whether any kind pays at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from unbounded.zero.step.early.comparison import Comparison
from unbounded.zero.step.early.in_backward import InBackward

# What the lane is idle per step, in times that an update takes it. A draft of weights adds about one, and the step gets
# shorter; a unit in two parts adds half of one.
TOO_BUSY, TOO_IDLE = 1.0, 2.5
TOO_LATE = 0.5  # how long others waited for moments in a step, likewise
REST = 50  # steps until more units are tried again after some were too many
MOST_MORE = 4  # drafts per step, or twice as many units in parts: a pause of the loop looks like an idle lane


class _Share:
    """What is written in one sort of steps."""

    def __init__(self, kinds: Sequence[InBackward], num_weights: int) -> None:
        self.comparison = Comparison(kinds)
        self.num_weights = num_weights  # drafts that there is memory for
        self.drafted = self.split = Pace.first  # drafts of weights, and units in two parts
        self._num_rest = 0

    def adapt(self, num_idle: float, num_late: float, num_updates: int) -> None:
        """The lane was idle, and others waited for moments, for as long as so many updates take.

        Drafts come first and go last, because they save more.
        """
        drafts, splits = (kind in self.comparison.kinds for kind in (InBackward.WEIGHTS, InBackward.MOMENTS))
        self._num_rest = max(0, self._num_rest - 1)
        if splits and self.split and num_late > TOO_LATE:
            self.split -= min(self.split, math.ceil(num_late))
            self._num_rest = REST
        elif num_idle > TOO_IDLE:
            more = min(MOST_MORE, int(num_idle / TOO_IDLE))
            if drafts and self.drafted < self.num_weights:
                self.drafted = min(self.num_weights, self.drafted + more)
            elif splits and not self._num_rest:
                self.split = min(num_updates, self.split + 2 * more)
        elif num_idle < TOO_BUSY:
            if splits and self.split:
                self.split -= max(1, self.split // 4)
            elif drafts and self.drafted:
                self.drafted -= max(1, self.drafted // 4)


class Pace:
    """Runs in the update lane, but for `allows`, which everybody may ask."""

    first = 0

    def __init__(self, counts: Mapping[InBackward, int]) -> None:
        """There is memory for so many drafts of each kind; moments: whether any unit may be updated in parts."""
        self._shares = {
            has_drafts: _Share(
                [kind for kind, count in counts.items() if count and (has_drafts or kind is InBackward.MOMENTS)],
                counts.get(InBackward.WEIGHTS, 0),
            )
            for has_drafts in (True, False)
        }
        self._busy_seconds = 0.0
        self._began: float | None = None

    def kinds(self, *, is_drafted: bool) -> tuple[InBackward, ...]:
        """What is written at all, in steps that have drafts or in those that cannot."""
        return self._shares[is_drafted].comparison.kinds

    def allows(self, kind: InBackward, num_weights: int) -> bool:
        """Whether to write another draft after so many of weights."""
        share = self._shares[True]
        return kind in share.comparison.kinds and (kind is InBackward.ALL or num_weights < share.drafted)

    def num_split(self, *, is_drafted: bool) -> int:
        """How many units to update in two parts."""
        share = self._shares[is_drafted]
        return share.split if InBackward.MOMENTS in share.comparison.kinds else 0

    def work(self, seconds: float) -> None:
        """The lane was busy for so long."""
        self._busy_seconds += seconds

    def begin_step(self, now: float, num_updates: int, late_seconds: float, *, is_drafted: bool) -> None:
        """A step with updates of so many units begins at this time, before which others waited for the last ones.

        `is_drafted`: drafts were possible before it.
        """
        if self._began is not None and self._busy_seconds and num_updates:
            seconds, share = now - self._began, self._shares[is_drafted]
            each = self._busy_seconds / num_updates
            share.adapt(seconds / each - num_updates, late_seconds / each, num_updates)
            share.comparison.note(seconds)
        self._began, self._busy_seconds = now, 0.0
