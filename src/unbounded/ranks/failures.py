"""Failures that happen on one rank and are raised on all.

A disk that fails on one rank fails in a lane, while its peers are on their way to the next gather. Raising there
would leave them waiting. So the rank notes the failure, takes part with zeros in what its peers expect, and all
ranks meet where every one of them passes: at the end of a forward whose weights are gathered, at the optimizer's
norm and step, at a save. There all ranks learn of the failure and raise it, before anything is updated.

    rank 0   gather u0 | gather u1         | gather u2 | meet: rank 1 failed ...
    rank 1   gather u0 | read u1 fails, 0s | gather u2 | meet: raises its own error

Only jobs with states on disk meet. Otherwise, and with one rank, a failure is raised where it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unbounded.errors import PeerError
from unbounded.ranks.axis import Axis


class Failures:
    """What failed on this rank since the ranks last met. `shared` says whether they do."""

    def __init__(self, ranks: Axis, *, shared: bool) -> None:
        self.shared = shared and ranks.size > 1
        self._ranks = ranks.lane("failures", "gloo") if self.shared else ranks
        self._noted: Exception | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keeps an error inside the block for the next meeting, and continues after it."""
        try:
            yield
        except Exception as error:
            if not self.shared or isinstance(error, PeerError):  # its peers will not come to the meeting
                raise
            if self._noted is None:
                self._noted = error

    def meet(self) -> None:
        """All ranks of the axis must call this. Raises on all of them what any has noted."""
        if self.shared:
            self._ranks.agree(self._take(), what="the meeting after a pass")

    def raise_noted(self) -> None:
        """Raises only on this rank, when its peers may be elsewhere."""
        error = self._take()
        if error is not None:
            raise error

    def forget(self) -> None:
        """Drops what was noted, because the states that it spoiled are being replaced on all ranks."""
        self._noted = None

    def _take(self) -> Exception | None:
        error, self._noted = self._noted, None
        return error
