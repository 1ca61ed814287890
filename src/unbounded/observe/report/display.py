"""Which display a run gets: none on other ranks, a picture in a notebook, a panel on a terminal, otherwise lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from unbounded.observe.progress import Lines, Panel, Progress, Silence, Step
from unbounded.observe.report.notebook import Notebook, in_notebook


def open_progress(*, speaks: bool, log_every: int) -> Progress:
    """The progress for this rank and this output."""
    if not speaks:
        return Silence()
    if in_notebook():
        return Steady(Notebook())
    return Steady(Panel() if sys.stdout.isatty() else Lines(log_every))


class Steady:
    """A display whose reader may go away, as in `unbounded train | head`; the run continues without it."""

    def __init__(self, inner: Progress) -> None:
        self.inner = inner

    def show(self, step: Step) -> None:
        """See `Progress.show`."""
        with self._going_on():
            self.inner.show(step)

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        with self._going_on():
            self.inner.say(text)

    def close(self) -> None:
        """See `Progress.close`."""
        with self._going_on():
            self.inner.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.inner = Silence()
            discard(sys.stdout)
            try:
                print(f"unbounded: the output is gone ({error}). The run continues without it.", file=sys.stderr)
            except OSError:
                discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """What is still written to the stream goes nowhere, because whoever read it is gone."""
    with suppress(OSError):  # a notebook's stream has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
