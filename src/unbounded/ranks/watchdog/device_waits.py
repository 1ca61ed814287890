"""Collectives in which a device waits: the host has launched them and gone on, so a thread follows their events.

Waiting in a collective begins when the stream reaches it, not when the host launches it, because the host may be a
whole pass ahead.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.verdict import Wait


@dataclass(eq=False)
class _Launched:
    post: Post
    number: int
    what: str
    num_bytes: int
    limit: float
    start: torch.cuda.Event
    end: torch.cuda.Event
    since: float | None = None  # when the stream was seen to have reached it


class DeviceWaits:
    """What was launched and is not over, by communicator, in order."""

    def __init__(self) -> None:
        self._launched: dict[str, deque[_Launched]] = {}

    def follow(self, post: Post, limit: float, start: torch.cuda.Event) -> None:
        """Called after a launch, on its stream; `start` was recorded before it."""
        end = torch.cuda.Event()
        end.record()
        entry = _Launched(post, post.begun, post.what, post.num_bytes, limit, start, end)
        self._launched.setdefault(post.key, deque()).append(entry)

    def waits(self, rank: int) -> list[tuple[Wait, float]]:
        """The collectives that streams are in now, with their limits. Called by one thread alone."""
        found = []
        for entries in list(self._launched.values()):
            while entries and entries[0].end.query():
                done = entries.popleft()
                done.post.end(done.number)
            if entries and entries[0].start.query():
                entry = entries[0]
                entry.since = entry.since or time.monotonic()
                seconds = time.monotonic() - entry.since
                wait = Wait(
                    rank, entry.post.key, entry.number, entry.what, seconds, entry.post.members, entry.num_bytes
                )
                found.append((wait, entry.limit))
        return found
