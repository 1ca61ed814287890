"""Whether the device has room for weights that are read from disk ahead of their use.

Reading ahead is a gain, not a need, so it must not take what a pass needs. What that is, is not known before a pass has
run; but what was held before a block of a pass that has ended may be held again, and a backward may take as much as it
has freed since it began. Gathered weights are not counted as held, because lanes take and free them at their own times.
"""

from __future__ import annotations

from collections.abc import Callable

from unbounded.activations.headroom import Meter


class ReadRoom:
    """Asked before every block. `gathered` says what gathered weights take now, `limit` what may be allocated."""

    def __init__(self, meter: Meter, *, limit: Callable[[], int], gathered: Callable[[], int]) -> None:
        self._meter, self._limit, self._gathered = meter, limit, gathered
        self._survived = self._since_forward = self._in_backward = 0  # the most that was held before a block

    def begin_backward(self) -> None:
        self._in_backward = 0

    def end_backward(self) -> None:
        self._survived = max(self._survived, self._since_forward, self._in_backward)
        self._since_forward = self._in_backward = 0

    def allows(self, num_bytes: int, *, is_backward: bool) -> bool:
        held = self._meter.allocated_bytes() - self._gathered()
        if is_backward:
            self._in_backward = max(self._in_backward, held)
        else:
            self._since_forward = max(self._since_forward, held)
        if held + num_bytes <= max(self._survived, self._in_backward):
            return True
        return held <= self._survived and self._meter.peak_bytes() + num_bytes <= self._limit()
