"""Which drafts are written at all: those with which steps turn out shortest.

A draft is written while the update lane would be idle, but that is not always free: the host's memory also serves the
copies of the backward, and the thread that launches its kernels gets slower next to busy cores. Where a backward is
short, that can cost more than the draft saves; how much depends on the machine. So a few steps are timed with all
drafts, a few with those of everything alone, and a few without any; and again later, in case the loop has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unbounded.zero.step.early.in_backward import InBackward

FIRST = 16  # steps before the first comparison: drafts take their memory and find their number
COMPARED = 6  # of each kind; a step or two that are long for another reason do not count
REST = 200  # steps until the next comparison, twice as many whenever it ends like the one before
LESS = 0.98  # what steps must get shorter by if drafts are left out


class Comparison:
    """Compares steps with drafts of all these kinds, without the last kind, and so on to none."""

    def __init__(self, kinds: Sequence[InBackward]) -> None:
        self._choices = [tuple(kinds[: len(kinds) - left_out]) for left_out in range(len(kinds) + 1)]
        self.kinds = self._choices[0]  # what is written now
        self._best: tuple[InBackward, ...] | None = None
        self._num_left, self._rest = FIRST, REST
        self._times: deque[float] = deque(maxlen=COMPARED)
        self._found: dict[tuple[InBackward, ...], float] = {}

    def note(self, seconds: float) -> None:
        """A step with drafts of these kinds took so long."""
        self._times.append(seconds)
        self._num_left -= 1
        if self._num_left > 0 or len(self._choices) == 1:
            return
        self._found[self.kinds] = median(self._times)
        left = [choice for choice in self._choices if choice not in self._found]
        if left:
            self._try(left[0], COMPARED + 1)  # the first step still uses what the backward before it has written
        else:
            self._decide()

    def _decide(self) -> None:
        everything, best = self._choices[0], min(self._found, key=lambda choice: self._found[choice])
        if self._found[best] > LESS * self._found[everything]:
            best = everything
        self._rest = 2 * self._rest if best == self._best else REST
        self._best = best
        self._found.clear()
        self._try(best, self._rest)

    def _try(self, kinds: tuple[InBackward, ...], num_steps: int) -> None:
        self.kinds, self._num_left = kinds, num_steps
