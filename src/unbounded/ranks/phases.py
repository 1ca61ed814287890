"""Compares what the ranks are about to do (a pass, a step, a save) before they do it.

Collectives match only by their order. A rank that evaluates while another trains would fill its weights with parts of
other units, or abort in the backend if the sizes differ. So before the first collective of a phase the ranks compare
what they are about to do, in one small vote on the host that runs ahead of it:

    main     enter(forward) | compute ...                | enter(backward) | ...
    words                   | vote |                                       | vote |
    fetch                   | read u0 | ticket | gather u0 | gather u1 |

A phase without a collective is not announced, because one rank may evaluate whole weights alone. A collective outside
any phase is its own phase.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from unbounded.errors import PeerError
from unbounded.ranks.axis import Axis, Pending
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.verdict import ADVICE


class Said(NamedTuple):
    """What a rank is about to do, what must be the same on all ranks, and the number of collectives so far."""

    text: str
    detail: str
    issued: int


class Ticket:
    """What one phase waits for before its first collective. It does not hold its `Phases`, which hold it."""

    def __init__(self, axis: Axis, account: Post | None, said: Said, before: Ticket | None) -> None:
        self._axis, self._account, self._said, self._before = axis, account, said, before
        marks = [zlib.crc32(said.text.encode()), zlib.crc32(said.detail.encode()), said.issued]
        with torch.inference_mode(False):  # another thread writes to it, in any grad mode
            self._votes = torch.tensor([*marks, *(-mark for mark in marks)], dtype=torch.int64, device="cpu")
        self._pending: Pending | None = None
        self._lock = threading.Lock()
        self._failure: str | None = None  # not the error: its traceback holds the user's frames, graph and model

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def launch(self) -> None:
        what = f"the comparison of what ranks do next ({self._said.text})"
        self._pending = self._axis.launch_max(self._votes, what)

    def wait(self) -> None:
        """Returns when every rank has reached the same phase; raises if one has reached another."""
        with self._lock:
            if self._pending is not None:
                try:
                    self._finish(self._pending)
                except PeerError as error:
                    self._failure = str(error)
                self._pending = self._before = None
            if self._failure is not None:
                raise PeerError(self._failure)

    def _finish(self, pending: Pending) -> None:
        if self._before is not None:
            self._before.wait()
        pending.finish()
        if self._votes[:3].add(self._votes[3:]).any():  # the greatest and the least differ
            self._failure = describe_difference(self._hear())

    def _hear(self) -> dict[int, Said]:
        """All ranks of the axis call this if one differs. What each of them is about to do.

        Raises if one cannot say it, because it waits elsewhere.
        """
        axis = self._axis
        if axis.watch is None or self._account is None:
            return {axis.members()[axis.rank]: self._said}
        what = f"{self._said.text}, which not every rank is about to do"
        heard = axis.watch.exchange(self._account, what, json.dumps(self._said), axis.limit)
        return {rank: Said(*json.loads(text)) for rank, text in sorted(heard.items())}


class Phases:
    """The phases of one model on the ranks of `axis`, announced in the order of the program."""

    def __init__(self, axis: Axis) -> None:
        self._is_shared = axis.size > 1
        self._axis = axis.lane("words", "gloo")
        self._account = self._axis.account()  # at once: a rank that has none would not be seen to be missing
        self._text: str | None = None
        self._detail = ""
        self.standing: Callable[[], str] = str  # what must be the same on every rank in all phases
        self._ticket: Ticket | None = None
        self._last: Ticket | None = None
        self._issued = 0

    def enter(self, text: str, detail: str = "") -> None:
        """Begins the phase `text`, until `leave` or the next `enter`; `detail` must be the same on every rank."""
        self._text, self._detail, self._ticket = text, detail, None

    def leave(self) -> None:
        """Ends the phase; what follows belongs to none."""
        self._text = None

    @contextmanager
    def during(self, text: str, detail: str = "") -> Iterator[None]:
        """Inside, the phase is `text`; afterwards it is the one from before."""
        before = self._text, self._detail, self._ticket
        self.enter(text, detail)
        try:
            yield
        finally:
            self._text, self._detail, self._ticket = before

    def ticket(self, alone: str) -> Ticket | None:
        """What the next collective waits for: the phase's ticket or, outside any, one for `alone`."""
        if not self._is_shared:
            return None
        if self._text is None:
            ticket = self._announce(alone, "")
        elif self._ticket is None:
            ticket = self._ticket = self._announce(self._text, self._detail)
        else:
            ticket = self._ticket
        self._issued += 1
        return ticket

    @contextmanager
    def together(self, text: str, detail: str = "") -> Iterator[None]:
        """All ranks of the axis must enter this. Like `during`, but it begins only when every rank has reached it."""
        with self.during(text, detail):
            ticket = self.ticket(text)
            if ticket is not None:
                ticket.wait()
            yield

    def confirm(self, alone: str, detail: str = "") -> None:
        """All ranks of the axis must call this. Returns when every rank is about to do `alone`, in whatever phase."""
        if self._is_shared:
            self._announce(alone, detail).wait()

    def _announce(self, text: str, detail: str) -> Ticket:
        before = self._last if self._last is not None and self._last.is_pending else None
        detail = "; ".join(filter(None, (detail, self.standing())))
        ticket = self._last = Ticket(self._axis, self._account, Said(text, detail, self._issued), before)
        ticket.launch()
        return ticket


class CopyPhases:
    """What the ranks that compute one copy of a model are about to do, compared on each of `axes`.

    Lanes are made when something is first compared. On an axis of one rank nothing is.
    """

    def __init__(self, axes: Iterable[Axis] = ()) -> None:
        self._axes = {axis.name: axis for axis in axes if axis.size > 1}
        self._phases: dict[str, Phases] = {}

    def confirm(self, text: str, detail: str = "", names: Iterable[str] | None = None) -> None:
        """All ranks of the axes must call this. Returns when all are about to do `text`, with the same `detail`.

        With `names`, it goes over those axes alone.
        """
        for name in self._axes if names is None else [name for name in names if name in self._axes]:
            if name not in self._phases:
                self._phases[name] = Phases(self._axes[name])
            self._phases[name].confirm(text, detail)


def describe_difference(said: Mapping[int, Said]) -> str:
    """Describes what ranks that differ are doing, by rank."""
    if len({one.text for one in said.values()}) > 1:
        shown = "; ".join(f"rank {rank} is in {one.text}" for rank, one in said.items())
        return f"the ranks are not doing the same: {shown}. {ADVICE}"
    text, first, _ = next(iter(said.values()))
    if len({one.issued for one in said.values()}) > 1:
        shown = ", ".join(f"rank {rank} {one.issued}" for rank, one in said.items())
        return (
            f"the ranks reached {text} after different numbers of gathers and reductions: {shown}. One of them "
            f"caught an exception that ended a pass early. {ADVICE}"
        )
    for rank, (_, detail, _) in said.items():
        if detail != first:
            pairs = zip(detail.split("; "), first.split("; "), strict=False)
            differing = ", ".join(f"{one} instead of {other}" for one, other in pairs if one != other)
            fact = f"rank {rank} has different settings in {text} from rank {min(said)}"
            return f"{fact}: {differing}. Set the same on every rank."
    return f"another rank is not in {text}. {ADVICE}"


def describe_groups(kind: str, groups: Iterable[Mapping[str, Any]]) -> str:
    """The hyper-parameters of an optimizer, to be compared. Tensors on a GPU are left out: reading one would wait."""
    shown = [kind]
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key == "params":
                continue
            if isinstance(value, torch.Tensor):
                if value.device.type != "cpu" or value.numel() != 1:
                    continue
                value = value.item()
            shown.append(f"{key}={value!r} (group {index})" if index else f"{key}={value!r}")
    return "; ".join(shown)
