"""The watchdog: a rank that waits in a collective learns whether those it waits for will come.

A thread that waits for longer than a heartbeat asks the heartbeat thread to look at the others, and goes on or raises
as `verdict` says. It waits in slices and is woken as soon as the collective is over, so a collective that is not late
costs nothing extra.

    main, lanes   | collective |   | collective ..... slice, slice, slice: verdict -> PeerError |
    heartbeat     | post |    | post |    | post, look |    | post, look |

A rank whose program ends in an exception says so before its process ends, and its peers raise that message.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unbounded.errors import PeerError
from unbounded.held_interrupts import deliver
from unbounded.ranks.watchdog import verdict
from unbounded.ranks.watchdog.device_waits import DeviceWaits
from unbounded.ranks.watchdog.first_meeting import name_ranks, name_run
from unbounded.ranks.watchdog.heartbeat import Heartbeat
from unbounded.ranks.watchdog.notices import Notices
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.verdict import Wait

LIMIT_SECONDS = 60.0
# A store that takes longer than a short limit may be one whose machine is busy.
LEAST_STORE_SECONDS = 5.0
# How long a failed rank stays so that its peers can read why, and how long it looks for why a connection broke. Where
# heartbeats are late because the machine is busy, both take longer.
FAREWELL_SECONDS = 3.0
_TEXT_CHARS = 4000


class Collective(Protocol):
    """A collective that torch has launched."""

    def wait(self, timeout: timedelta = ...) -> Any: ...
    def is_completed(self) -> bool: ...


class Watch:
    """Watches over the collectives of this rank, on all communicators of the job."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.rank, self.heartbeat = heartbeat.rank, heartbeat
        self._reason: str | None = None  # why this rank gave up waiting
        self._slice = timedelta(seconds=self.beat)
        self._device_waits = DeviceWaits()
        self._device_thread: threading.Thread | None = None

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats, and the length of a slice."""
        return self.heartbeat.seconds

    def quicken(self, limit: float) -> None:
        """Beats often enough for a limit of so many seconds."""
        self.heartbeat.seconds = min(self.heartbeat.seconds, limit / 4)
        self._slice = timedelta(seconds=self.beat)

    def check(self, post: Post) -> None:
        """Raises if the job has already failed, because what is about to begin would not end."""
        if self._reason is not None:
            raise PeerError(
                f"the job has failed, so its ranks can no longer go on together: {self._reason} Start all of them "
                "again, from the last checkpoint if there is one."
            )
        if self.heartbeat.failure is not None:
            self._reason = self._told(post.what)
            if self._reason is not None:
                raise PeerError(self._reason)

    def wait(
        self, work: Collective, group: dist.ProcessGroup, post: Post, limit: float, number: int | None = None
    ) -> None:
        """Returns when the last collective of `post`, or its `number`th, is over; raises if it will never be."""
        if not self._is_over(work, post):
            with self.heartbeat.looking():
                while not self._is_over(work, post):
                    deliver()
                    reason = self._judge(post.wait(self.rank, number), limit)
                    if reason is not None:
                        keep_unfinished(work, group)
                        raise self._give_up(reason)
        post.end(number)

    def follow(self, post: Post, limit: float, start: torch.cuda.Event) -> None:
        """A collective was launched that a device waits in; `start` was recorded before it, on the same stream."""
        self._device_waits.follow(post, limit, start)
        if self._device_thread is None:
            # Not the heartbeat's thread, which the store of a stopped rank may block.
            self._device_thread = threading.Thread(
                target=self._watch_device, name="unbounded-device-watch", daemon=True
            )
            self._device_thread.start()

    def exchange(self, post: Post, what: str, text: str, limit: float) -> dict[int, str]:
        """What each member of `post` says next, in a wait that errors call `what`; raises if one will not come to."""
        post.begin(what, "")
        key, ranks = f"{post.key}/{post.begun}", post.members
        self.heartbeat.ask(lambda notices: notices.say(key, text), limit)
        heard: dict[int, str] = {self.rank: text}
        with self.heartbeat.looking():
            while len(heard) < len(ranks):
                heard |= self.heartbeat.ask(lambda notices: notices.hear(key, ranks), limit) or {}
                reason = self._judge(post.wait(self.rank), limit) if len(heard) < len(ranks) else None
                if reason is not None:
                    raise self._give_up(reason)
                time.sleep(0.02)
        post.end()
        return heard

    def close(self, error: BaseException | None) -> None:
        """The program ends, in `error` if any. Stays a little for peers that have not read yet what failed."""
        heartbeat = self.heartbeat
        if not heartbeat.is_alive():
            return
        if error is not None:
            heartbeat.fail(_describe(error)[:_TEXT_CHARS], FAREWELL_SECONDS)
        began = time.monotonic()
        while heartbeat.failure is not None and time.monotonic() - began < self._farewell_seconds():
            if (heartbeat.ask(lambda notices: notices.count("told", 0), FAREWELL_SECONDS) or 0) >= heartbeat.size:
                break
            time.sleep(self.beat / 4)
        heartbeat.end(FAREWELL_SECONDS)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _is_over(self, work: Collective, post: Post) -> bool:
        try:
            work.wait(self._slice)
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait(self._slice)  # it may have succeeded just after the slice
            except RuntimeError as error:
                raise self.explain(error, post) from error
        return True

    def _give_up(self, reason: str) -> PeerError:
        """This rank gives up, and tells whoever comes later or waits for it."""
        self._reason = reason
        self.heartbeat.fail(reason[:_TEXT_CHARS], FAREWELL_SECONDS)
        return PeerError(reason)

    def _judge(self, wait: Wait, limit: float) -> str | None:
        reason = self._told(wait.what)
        if reason is not None:
            return reason
        lost = time.monotonic() - self.heartbeat.contact
        if lost < limit:
            reason = verdict.judge(wait, self.heartbeat.seen(), limit, self.beat)
            return reason and (self._told(wait.what) or reason)  # it may have left after it said why
        if lost < max(LEAST_STORE_SECONDS, self._silence_limit()) or wait.seconds < limit:
            return None  # what was heard of others is old
        return (
            f"rank {self.rank} waited {wait.seconds:.0f} s in {wait.what}, and the job's store, which rank 0 or its "
            f"launcher holds, has not answered for {lost:.0f} s: that process was stopped or killed, or the link to it "
            "is lost."
        )

    def _told(self, what: str) -> str | None:
        """Why another rank failed."""
        failure = self.heartbeat.failure
        if failure is None or failure[0] == self.rank:
            return None
        return f"rank {failure[0]} failed: {failure[1]} (rank {self.rank} was in {what})"

    def explain(self, error: RuntimeError, post: Post) -> PeerError:
        """What this rank raises when a connection broke; it then gives up."""
        post.end()
        return self._give_up(self._find_reason(error, post))

    def _find_reason(self, error: RuntimeError, post: Post) -> str:
        """Why a connection broke: usually the rank at the other end failed or was killed."""
        what, began = post.what, time.monotonic()
        with self.heartbeat.looking():
            while True:
                missing = self._missing(what)
                reason = self._reason or self._told(what) or missing  # who is missing may have said why before
                if reason is not None:
                    return reason
                if self.heartbeat.is_cut or time.monotonic() - began >= 3 * self._farewell_seconds():
                    break
                time.sleep(self.beat / 4)
        others = [rank for rank in post.members if rank != self.rank]
        fact = f"rank {self.rank} lost the connection to {name_ranks(others, 'or')} in {what}: {error}"
        silent = time.monotonic() - self.heartbeat.contact
        if self.heartbeat.is_cut:
            how = "cannot be reached"
        elif silent >= self._silence_limit():
            how = f"has not answered for {silent:.0f} s"
        else:
            return fact
        return (
            f"{fact} The job's store, which rank 0 or its launcher holds, {how} either: that process has probably "
            "ended. Look for the first error in its output."
        )

    def _missing(self, what: str) -> str | None:
        for seen in self.heartbeat.seen().values():
            if seen.rank != self.rank and (seen.has_left or seen.silent_seconds >= self._silence_limit()):
                why = f"which has ended. {seen.last()}." if seen.has_left else verdict.describe_silence(seen)
                return f"rank {self.rank} was in {what} with rank {seen.rank}, {why}"
        return None

    def _farewell_seconds(self) -> float:
        return max(FAREWELL_SECONDS, self._silence_limit())

    def _silence_limit(self) -> float:
        return verdict.silence_limit(self.beat, self.heartbeat.gaps)

    def _watch_device(self) -> None:
        """Nothing can be raised in a thread that waits for a device, so if a device waits in vain, the process ends."""
        while self.heartbeat.is_alive():
            time.sleep(self.beat)
            late = [(wait, limit) for wait, limit in self._device_waits.waits(self.rank) if wait.seconds >= self.beat]
            if not late:
                continue
            with self.heartbeat.looking():
                reason = None
                while late and reason is None:
                    reason = next(filter(None, (self._judge(wait, limit) for wait, limit in late)), None)
                    time.sleep(self.beat)
                    late = [pair for pair in self._device_waits.waits(self.rank) if pair[0].seconds >= self.beat]
            if late and reason is not None:
                self._give_up(reason)
                print(f"unbounded: {reason}", file=sys.stderr, flush=True)
                os._exit(1)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def _describe(error: BaseException) -> str:
    """What peers are told of an error of the user's, which may be unable to show itself."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return f"{name}, whose text cannot be shown"


def watch_job() -> Watch | None:
    """All ranks must call this. The watch over the job's process group, started at the first call."""
    group = dist.group.WORLD
    if group is None or dist.get_backend(group) == "fake":
        return None
    if group not in _watches:
        store = dist.distributed_c10d._get_default_store()
        notices = Notices(store, name_run(group), dist.get_rank(), dist.get_world_size())
        _watches[group] = Watch(Heartbeat(group, notices))
    return _watches[group]


def keep_unfinished(work: Collective | None, group: dist.ProcessGroup | None) -> None:
    """Keeps a group for ever whose threads are in a collective that may never end: it would wait for them when freed,
    with everything else in this process waiting for it."""
    if work is not None and not work.is_completed():
        for part in (work, group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


_endings: list[Callable[[], None]] = []


def at_end(function: Callable[[], None]) -> Callable[[], None]:
    """Has `function` called when the program ends, after the peers were told."""
    _endings.append(function)
    return function


def _say_farewell() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for watch in list(_watches.values()):
        watch.close(error)
    for end in _endings:
        end()
    Heartbeat.end_all(FAREWELL_SECONDS)


atexit.register(_say_farewell)
