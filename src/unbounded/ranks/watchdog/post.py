"""Where this rank is in the sequence of one communicator's collectives: written as it goes, read by the heartbeat."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unbounded.ranks.watchdog.verdict import Place, Wait


class Post:
    """The collectives of one communicator on this rank. Its thread writes plain fields, which costs almost nothing."""

    def __init__(self, key: str, members: Sequence[int]) -> None:
        self.key, self.members = key, tuple(members)
        self.begun = self.ended = 0
        self.operation, self.subject = "", ""
        self.num_bytes = 0
        self.since = time.monotonic()

    def begin(self, operation: str, subject: str, num_bytes: int = 0) -> None:
        """The next collective is about to be launched."""
        self.operation, self.subject, self.num_bytes = operation, subject, num_bytes
        self.since = time.monotonic()
        self.begun += 1

    def end(self, number: int | None = None) -> None:
        """The last one is over, or the `number`th."""
        self.since = time.monotonic()
        self.ended = self.begun if number is None else number

    def reopen(self, number: int) -> None:
        """Somebody now waits for the `number`th, which nobody has waited for since it was launched."""
        self.since = time.monotonic()
        self.ended = number - 1

    @property
    def what(self) -> str:
        """The last collective in words."""
        return f"{self.operation} of {self.subject}" if self.subject else self.operation

    def place(self) -> Place:
        return Place(self.begun, self.begun > self.ended, self.what, time.monotonic() - self.since)

    def wait(self, rank: int, number: int | None = None) -> Wait:
        """The wait that this rank is in: for the last collective, or the `number`th."""
        return Wait(
            rank, self.key, number or self.begun, self.what, time.monotonic() - self.since, self.members, self.num_bytes
        )
