"""How a device's budget is shared between states and activations, once steps have been seen.

Before the first batch nobody knows what activations take, so part of the budget is set aside for them. After a few
steps it is known what was left over, and what blocks kept that could be recomputed. A GiB of states on the device saves
about 14 ms per step, a GiB of kept activations 4 to 6 (docs/design/activations.md). So states are moved to the device,
first into unused memory and then in place of what was kept, until the step gets longer. What one move gains is often
less than steps differ by, so a move that changes nothing is not undone:

    WARMING --> MEASURING --(not longer)--> more states to the device, and MEASURING again
                          --(longer)--> the last ones back, DONE

This is only the decision: numbers in, a number of units out. `zero.step.relocation` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

# Steps that are not timed: kernels are loaded and compiled, and after a move the first step waits for it.
WARM_STEPS, SETTLE_STEPS = 4, 2
# Steps whose median counts, and how much longer than the best one so far it may be.
TIMED_STEPS, SLACK = 3, 1.01
# The share of memory unused at the peak that is left alone: the next batch may be a little larger.
MARGIN_PART = 1 / 16
# The share of what blocks kept that one move takes.
KEPT_PART = 1 / 4


class Balance:
    """Decides for one rank, step by step."""

    def __init__(self) -> None:
        self.is_done = False
        self._skipped = WARM_STEPS
        self._times: list[float] = []
        self._best: float | None = None
        self._moved = 0

    def after_step(self, seconds: float, *, free_bytes: int, kept_bytes: int, waiting: Sequence[int]) -> int:
        """How many units' states to move to the device now; if negative, those of the last move go back.

        `free_bytes` of the device were not used at the peak of these steps, `kept_bytes` were taken by what blocks
        kept. `waiting` are the sizes of the states that could be moved, in that order.
        """
        if self.is_done:
            return 0
        if self._skipped:
            self._skipped -= 1
            return 0
        self._times.append(seconds)
        if len(self._times) < TIMED_STEPS:
            return 0
        now, self._times = median(self._times), []
        if self._best is not None and now > self._best * SLACK:
            self.is_done = True
            return -self._moved
        self._best = now if self._best is None else min(self._best, now)
        self._moved = _count(waiting, free_bytes, kept_bytes)
        self.is_done = self._moved == 0
        self._skipped = SETTLE_STEPS
        return self._moved

    def stop(self) -> None:
        """A batch did not fit, so no more states go to the device."""
        self.is_done = True


def _count(waiting: Sequence[int], free_bytes: int, kept_bytes: int) -> int:
    """How many fit into unused memory or, if none does, also into a part of what was kept."""
    return _fitting(waiting, free_bytes * (1 - MARGIN_PART)) or _fitting(waiting, free_bytes + kept_bytes * KEPT_PART)


def _fitting(waiting: Sequence[int], room: float) -> int:
    count = 0
    for size in waiting:
        room -= size
        if room < 0:
            break
        count += 1
    return count
