"""Which parameters of a unit have a gradient: what this rank knows, and what all ranks have voted on.

Ranks may use different parameters in a backward, but its gradients are those of all of them. So at its end the ranks
vote on who has one. The vote is in flight on the host until somebody asks. Then the flags are the same on all ranks,
and so is whatever follows from `p.grad is None`: clearing, scaling, norms over a list of gradients. Backwards inside
`no_sync` exchange nothing: until another one follows, or the step, each rank knows only its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from unbounded.ranks.axis import Axis
from unbounded.ranks.phases import Ticket


class Vote:
    """All ranks of `axis` must make one. The greatest of each flag over the ranks."""

    def __init__(self, axis: Axis, flags: bytes, ticket: Ticket | None) -> None:
        self._ticket = ticket
        with torch.inference_mode(False):  # another thread writes to it, in any grad mode
            self._votes = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
        self._pending = axis.launch_max(self._votes, "the vote on who has a gradient")
        self._result: bytes | None = None
        self._lock = threading.Lock()  # the reduce lane may ask too

    def result(self) -> bytes:
        """Returns when all ranks have voted."""
        with self._lock:
            if self._result is None:
                if self._ticket is not None:
                    self._ticket.wait()
                self._pending.finish()
                self._result = self._votes.numpy().tobytes()
            return self._result


class Use:
    """One flag for each parameter of a unit."""

    def __init__(self, num_slots: int) -> None:
        self._flags = bytearray(num_slots)
        self._vote: tuple[Vote, int] | None = None  # in flight, with the place of these flags in it

    @property
    def flags(self) -> bytearray:
        """Which parameters have a gradient, to read and to change. Returns when a vote on them is over."""
        if (asked := self._vote) is not None:
            vote, start = asked
            self._flags[:] = vote.result()[start : start + len(self._flags)]
            self._vote = None
        return self._flags

    def put(self, flags: Iterable[int]) -> None:
        """Replaces all flags, whatever a vote would say."""
        self._flags, self._vote = bytearray(flags), None

    def clear(self) -> None:
        self.put(bytes(len(self._flags)))

    def expect(self, vote: Vote, start: int) -> None:
        """A vote on these flags is in flight, at `start` in it."""
        self._vote = vote, start
