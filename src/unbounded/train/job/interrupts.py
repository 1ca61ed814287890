"""Ctrl-C, SIGTERM and the end of a terminal: the current step is finished and saved; a second Ctrl-C does not wait.

What the process was started to ignore, as with `nohup`, stays ignored. A terminal that is gone takes no output.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, TextIO

from unbounded.observe.report.display import discard

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Inside its `with`, `received` is the first of the signals that came, or None."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._former: dict[int, Any] = {}
        self._terminals: list[TextIO] = []

    def __enter__(self) -> Interrupts:
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            for stream in self._terminals:
                discard(stream)
        self.received = self.received or number


def exit_code(number: int) -> int:
    """What a shell reports for a process that a signal ended."""
    return 128 + number
