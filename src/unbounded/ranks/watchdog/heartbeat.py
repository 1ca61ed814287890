"""The heartbeat: one thread per process that tells where this rank is, and reads where the others are.

Everything that goes to the job's store goes through it, because the store blocks for as long as its host does. Whoever
wants something of it asks, with a time limit; `contact` is when it last answered.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from unbounded.ranks.watchdog import whereabouts
from unbounded.ranks.watchdog.notices import Notices
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.verdict import Seen

BEAT_SECONDS = 1.0
# Every heartbeat that still has its thread. A group that was destroyed is forgotten, but not what beats for it.
_beating: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


@dataclass
class _Heard:
    """What was heard of one peer: its first and its last beat, when that changed, and where it is."""

    first: int
    beat: int
    changed: float
    seen: Seen

    def judged_at(self, now: float) -> Seen:
        silent = max(0.0, now - self.changed)
        return replace(self.seen, silent_seconds=silent, has_beaten=self.beat != self.first)


class Heartbeat:
    """Beats for as long as the job's process group lives."""

    def __init__(self, group: dist.ProcessGroup, notices: Notices) -> None:
        self.rank, self.size = notices.rank, notices.size
        self.seconds = BEAT_SECONDS
        self.failure: tuple[int, str] | None = None  # why the job failed, and where
        self.contact = time.monotonic()
        self.is_cut = False  # the connection to the store is broken: torch makes no other, and prints a page per try
        self.gaps: deque[float] = deque(maxlen=16)  # seconds that the last beats took, waiting for their time included
        self._group = weakref.ref(group, self._wake)
        self._notices = notices
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._posts: dict[str, Post] = {}
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lookers = 0
        self._heard: dict[int, _Heard] = {}  # for every peer, since somebody here began to look
        self._still_since = time.monotonic()  # since when this rank has only waited
        self._counts = self._number = 0
        self._next_look, self._has_ended = 0.0, False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="unbounded-heartbeat", daemon=True)
        self._thread.start()
        _beating.add(self)

    # -- for others ------------------------------------------------------------------------------------------------

    def post(self, key: str, members: Sequence[int]) -> Post:
        """The record of these ranks' collectives, which come in one order. Made at the first call."""
        if key not in self._posts:
            self._posts[key] = Post(key, members)
        return self._posts[key]

    def is_alive(self) -> bool:
        """Whether it beats in this process; a forked process has no heartbeat."""
        return os.getpid() == self._process and self._thread.is_alive()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, the others are read at every beat."""
        with self._lock:
            if not self._lookers:
                self._heard = {}
            self._lookers += 1
        try:
            yield
        finally:
            with self._lock:
                self._lookers -= 1

    def seen(self) -> dict[int, Seen]:
        """Every rank as it was last heard of, and this one as it is."""
        found = {rank: heard.judged_at(self.contact) for rank, heard in list(self._heard.items())}
        return found | {self.rank: self._own()}

    def ask(self, question: Callable[[Notices], Any], limit: float) -> Any:
        """What `question` gets from the notices; None if the store does not answer in time."""
        done, answers = threading.Event(), []

        def answer() -> None:
            try:
                if not self.is_cut:
                    answers.append(question(self._notices))
            finally:
                done.set()

        self._requests.put(answer)
        deadline = time.monotonic() + limit
        while not done.wait(min(0.1, limit)) and time.monotonic() < deadline and self.is_alive():
            pass
        return answers[0] if answers else None

    def fail(self, text: str, limit: float) -> None:
        """Tells the job why this rank failed, unless another has failed before it."""

        def tell(notices: Notices) -> None:
            notices.fail(text)
            self._hear_failure()

        self.ask(tell, limit)

    def end(self, limit: float) -> None:
        """Says that this rank has left, and ends the thread."""
        self._requests.put(self._end)
        self._thread.join(limit)

    @staticmethod
    def end_all(limit: float) -> None:
        """Ends every one of this process: a thread still inside torch when the interpreter ends would abort it."""
        deadline = time.monotonic() + limit
        for heartbeat in [heartbeat for heartbeat in _beating if heartbeat.is_alive()]:
            heartbeat.end(max(0.0, deadline - time.monotonic()))

    # -- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        while not self._has_ended:
            try:
                began = time.monotonic()
                request = self._next_request()
                if request is not None:
                    request()
                if time.monotonic() >= due or self._has_ended:
                    self._pulse()
                    due = time.monotonic() + self.seconds
                    self.gaps.append(time.monotonic() - began)
            except Exception as error:  # the store is gone: whoever waits will say so
                self.is_cut = self.is_cut or isinstance(error, dist.DistNetworkError)
                time.sleep(min(self.seconds, 0.25))
                self._has_ended = self._has_ended or not self._is_current()

    def _next_request(self) -> Callable[[], None] | None:
        try:
            return self._requests.get(timeout=self.seconds)
        except queue.Empty:
            return None

    def _pulse(self) -> None:
        self._has_ended = self._has_ended or not self._is_current()
        if self.is_cut:
            return
        self._number += 1
        self._notices.post(replace(self._own(), has_left=self._has_ended), self._number)
        self._hear_failure()
        if self._has_ended and self.failure is None:
            self._notices.count("told", 1)  # nobody has to wait for this rank to hear of a failure
        if self._lookers and time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + self.seconds * self.size / 64  # with many ranks, each looks less often
        self.contact = time.monotonic()

    def _own(self) -> Seen:
        places = {key: post.place() for key, post in list(self._posts.items())}
        where, doing = whereabouts.look(self._thread.ident or 0)
        counts = sum(place.begun * 2 - place.is_inside for place in places.values())
        if doing != "waiting" or counts != self._counts:
            self._counts, self._still_since = counts, time.monotonic()
        return Seen(self.rank, places, where, doing, time.monotonic() - self._still_since)

    def _hear_failure(self) -> None:
        if self.failure is None:
            self.failure = self._notices.failure()
            if self.failure is not None:
                self._notices.count("told", 1)

    def _look(self) -> None:
        now, everyone = time.monotonic(), self._heard
        posts = self._notices.read(self._others)
        self._hear_failure()  # before anybody here learns who has left, since he said why before he did
        for rank, (beat, seen) in posts.items():
            heard = everyone.setdefault(rank, _Heard(beat, beat, now, seen))
            if beat != heard.beat:
                heard.beat, heard.changed = beat, now
            heard.seen = seen

    def _end(self) -> None:
        self._has_ended = True

    def _wake(self, group: object) -> None:
        """The job's process group is gone, and with it this heartbeat."""
        self._requests.put(self._end)

    def _is_current(self) -> bool:
        group = self._group()
        return group is not None and dist.is_initialized() and dist.group.WORLD is group
