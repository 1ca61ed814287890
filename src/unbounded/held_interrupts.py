"""Ctrl-C while the library changes its own state: it is noted, and delivered where that state is whole.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between one that says that weights
are on their way and one that notes who brings them. So a call of the engine holds it back until the call is over, or
until it waits for something (`wait`, `deliver`): there, an error of what it waits for may be raised as well.
"""

from __future__ import annotations

import os
import threading

# Those of the module `signal` look for an enum first, which takes ten times as long; this is on the hot path.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from signal import SIGINT
from types import FrameType
from typing import Any

_SLICE_SECONDS = 0.1


class _Note:
    """A handler of SIGINT that keeps the last one for `handler`."""

    def __init__(self, handler: Any) -> None:
        self._handler, self._pid = handler, os.getpid()
        self._frames: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._frames[:] = [frame]
        if os.getpid() != self._pid:  # a child that was forked in the meantime: nothing there would deliver it
            self.end()

    def deliver(self) -> None:
        if self._frames:
            self._handler(SIGINT, self._frames.pop())

    def end(self) -> None:
        if getsignal(SIGINT) is self:
            signal(SIGINT, self._handler)
        self.deliver()


class HeldBack:
    """Inside, on the main thread, no handler of SIGINT is called. One inside another changes nothing."""

    __slots__ = ("_note",)

    def __enter__(self) -> None:
        self._note: _Note | None = None
        if _is_main():
            handler = getsignal(SIGINT)
            if callable(handler) and not isinstance(handler, _Note):
                self._note = _Note(handler)
                signal(SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._note is not None:
            self._note.end()


def wait(event: threading.Event) -> None:
    """Returns when `event` is set, or raises what was held back."""
    if event.is_set():
        return
    if not _is_main():
        event.wait()
        return
    while not event.wait(_SLICE_SECONDS):
        deliver()


def deliver() -> None:
    """Calls the handler now if a signal was held back."""
    if _is_main() and isinstance(note := getsignal(SIGINT), _Note):
        note.deliver()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
