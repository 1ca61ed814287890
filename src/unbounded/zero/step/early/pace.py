"""How many drafts of new weights alone are written in a backward: as many as the update lane has time for.

Such a draft is work besides the update of its states, about as much as that. It shortens the next forward, which does
not wait for that update, and it is free while the lane would be idle. But when the lane is always busy, steps take as
long as its work, and each such draft makes them longer. In between is the number with which steps are shortest: where
the lane is idle for about as long as one or two units take it.
"""

from __future__ import annotations

# What the lane is idle per step, in times that a unit takes it. An added draft takes one, and the step gets shorter.
TOO_BUSY, TOO_IDLE = 1.0, 2.5
MOST_MORE = 4  # per step: a pause of the loop looks like an idle lane


class Pace:
    """Runs in the update lane, but for `most`, which everybody may read."""

    first = 0

    def __init__(self, num_drafts: int) -> None:
        self.most = self.first
        self._num_drafts = num_drafts
        self._busy_seconds = 0.0
        self._began: float | None = None

    def work(self, seconds: float) -> None:
        """The lane was busy for so long."""
        self._busy_seconds += seconds

    def begin_step(self, now: float, num_updates: int) -> None:
        """A step with updates of so many units begins at this time."""
        if self._began is not None and self._busy_seconds:
            self._adapt((now - self._began) / self._busy_seconds, num_updates)
        self._began, self._busy_seconds = now, 0.0

    def _adapt(self, times: float, num_updates: int) -> None:
        """The last step took so many times as long as the lane was busy."""
        num_idle = (times - 1) * num_updates
        if num_idle > TOO_IDLE:
            self.most = min(self._num_drafts, self.most + min(MOST_MORE, int(num_idle / TOO_IDLE)))
        elif num_idle < TOO_BUSY:
            self.most -= min(self.most, max(1, self.most // 4))
