"""Ctrl-C while the library changes its own state: it is noted, and delivered where that state is whole.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between one that says that weights
are on their way and one that notes who brings them. There, a program's own handler of another signal (a time limit, the
end of a job) may raise too. So a call of the engine holds signals back until the call is over, or until it waits for
something (`wait`, `deliver`): there, an error of what it waits for may be raised as well.
"""

from __future__ import annotations

import os
import threading

# Those of the module `signal` look for an enum first, which takes ten times as long; this is on the hot path.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from types import FrameType
from typing import Any

_SLICE_SECONDS = 0.1
# Those that end a job, announce its end, or limit a time: programs let their handlers raise. Plain numbers are faster.
_NUMBERS = tuple(map(int, (SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2)))
_current: _Note | None = None  # while signals are held back


class _Note:
    """The handler of all signals that are held back. It keeps the last one of each for the handlers of the program."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._handlers: dict[int, Any] = {}
        self._frames: dict[int, FrameType | None] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._frames[number] = frame
        if os.getpid() != self._pid:  # a child that was forked in the meantime: nothing there would deliver it
            self.end()

    def begin(self) -> None:
        for number in _NUMBERS:
            handler = getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal(number, self)

    def deliver(self) -> None:
        while self._frames:
            number, frame = self._frames.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.deliver()

    def end(self) -> None:
        try:
            self._restore()
        except BaseException:  # of a handler that is back already: the others are not yet
            self._restore()
            raise
        finally:
            self.deliver()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if getsignal(number) is self:
                signal(number, handler)


class HeldBack:
    """Inside, on the main thread, no handler of a signal is called. One inside another changes nothing."""

    __slots__ = ("_note",)

    def __enter__(self) -> None:
        global _current
        self._note: _Note | None = None
        if _current is None and _is_main():
            self._note = _current = _Note()
            try:
                self._note.begin()
            except BaseException:  # of a handler that was not held back yet
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        global _current
        if self._note is not None:
            _current = None
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
    """Calls the handlers now of signals that were held back."""
    if _current is not None and _is_main():
        _current.deliver()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
