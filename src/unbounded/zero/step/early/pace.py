"""How many drafts are written in a backward. Of new weights alone, as many as the update lane has time for.

Such a draft is work besides the update of its states, about as much as that. It shortens the next forward, which does
not wait for that update, and it is free while the lane would be idle. But when the lane is always busy, steps take as
long as its work, and each such draft makes them longer. In between is the number with which steps are shortest: where
the lane is idle for about as long as one or two units take it. `Comparison` then tells whether any kind of draft pays.
"""

from __future__ import annotations

from unbounded.zero.step.early.comparison import Comparison
from unbounded.zero.step.early.drafted import Drafted

# What the lane is idle per step, in times that a unit takes it. An added draft takes one, and the step gets shorter.
TOO_BUSY, TOO_IDLE = 1.0, 2.5
MOST_MORE = 4  # per step: a pause of the loop looks like an idle lane


class Pace:
    """Runs in the update lane, but for `allows`, which everybody may ask."""

    first = 0

    def __init__(self, num_all: int, num_weights: int) -> None:
        """There is memory for so many drafts of everything, and of weights."""
        counts = {Drafted.ALL: num_all, Drafted.WEIGHTS: num_weights}
        self.comparison = Comparison([kind for kind, count in counts.items() if count])
        self.most = self.first  # drafts of weights in one backward
        self._num_weights = num_weights
        self._busy_seconds = 0.0
        self._began: float | None = None

    def allows(self, kind: Drafted, num_weights: int) -> bool:
        """Whether to write another draft after so many of weights."""
        return kind in self.comparison.kinds and (kind is Drafted.ALL or num_weights < self.most)

    def work(self, seconds: float) -> None:
        """The lane was busy for so long."""
        self._busy_seconds += seconds

    def begin_step(self, now: float, num_updates: int, *, is_drafted: bool) -> None:
        """A step with updates of so many units begins at this time, after a backward in which drafts were possible."""
        if self._began is not None and self._busy_seconds and is_drafted:
            seconds = now - self._began
            if Drafted.WEIGHTS in self.comparison.kinds:
                self._adapt(seconds / self._busy_seconds, num_updates)
            self.comparison.note(seconds)
        self._began, self._busy_seconds = now, 0.0

    def _adapt(self, times: float, num_updates: int) -> None:
        """The last step took so many times as long as the lane was busy."""
        num_idle = (times - 1) * num_updates
        if num_idle > TOO_IDLE:
            self.most = min(self._num_weights, self.most + min(MOST_MORE, int(num_idle / TOO_IDLE)))
        elif num_idle < TOO_BUSY:
            self.most -= min(self.most, max(1, self.most // 4))
