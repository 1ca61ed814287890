"""What a process is doing, read from its stacks by another thread, as the heartbeat does."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unbounded
from tests import process
from unbounded import held_interrupts
from unbounded.ranks.watchdog import whereabouts

OURS, TORCH = os.path.dirname(unbounded.__file__), os.path.dirname(torch.__file__)
SAVING = os.path.join(OURS, "checkpoint", "writer.py")
COMPILING = os.path.join(TORCH, "_dynamo", "convert_frame.py")


def call_from(filename: str) -> Callable[..., Any]:
    """A function that calls what it is given, and looks as if it were defined in `filename`."""
    names: dict[str, Any] = {}
    exec(compile("def call(function, *arguments):\n    return function(*arguments)", filename, "exec"), names)
    call: Callable[..., Any] = names["call"]
    return call


@pytest.mark.parametrize(
    ("filename", "doing"),
    [
        ("/home/user/train.py", "running"),
        (os.path.join(os.path.dirname(TORCH), "transformers", "trainer.py"), "running"),
        (SAVING, "working"),
        (COMPILING, "working"),
        (os.path.join(OURS, "ranks", "axis.py"), "waiting"),
        (os.path.join(OURS, "tiers", "lane.py"), "waiting"),
    ],
)
def test_the_innermost_frame_tells_who_is_at_work(filename: str, doing: str) -> None:
    seen, done, main = [], threading.Event(), threading.get_ident()

    def is_there() -> bool:
        with whereabouts._nothing_collected():
            frame = sys._current_frames()[main]
            while frame is not None and frame.f_code.co_filename != filename:
                frame = frame.f_back  # type: ignore[assignment]
            return frame is not None

    def look() -> None:
        process.eventually(is_there)
        seen.append(whereabouts.look(threading.get_ident()))
        done.set()

    threading.Thread(target=look).start()
    call_from(filename)(held_interrupts.wait, done)  # as whoever waits for a lane does
    where, found = seen[0]
    assert found == doing
    expected = "user/train.py:2 in call" if filename.startswith("/home") else ""
    assert expected in where


def test_no_garbage_is_collected_during_a_look() -> None:
    """Until Python 3.12 the frames of another thread may go while a look at them allocates: that ends in a crash."""
    collections, before = [], gc.get_threshold()

    def count(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not whereabouts._look.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            collections.append(phase)

    gc.callbacks.append(count)
    gc.set_threshold(1)  # whatever allocates collects
    try:
        for is_enabled in (True, False):
            if not is_enabled:
                gc.disable()
            for _ in range(50):
                whereabouts.look(threading.get_ident())
            assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
    if sys.version_info < (3, 12):  # later ones collect between instructions only, when no look is half made
        assert not collections
