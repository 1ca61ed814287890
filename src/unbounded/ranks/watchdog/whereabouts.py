"""What this process is doing, read from the stacks of its threads: for peers that wait for it.

The working code reports nothing, and a look at the stacks once per heartbeat does not slow it down. The innermost frame
that is neither torch's nor Python's own decides: it is the user's, or this library's, which then works or waits.

Before Python 3.12, a look allocates, an allocation may collect garbage, and that may let the other threads run, whose
frames are gone when the look goes on: it would then write to memory that is no longer a frame. So nothing is collected
during a look.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_WAITING = (os.path.join(_OURS, "ranks") + os.sep, os.path.join(_OURS, "tiers", "lane.py"))
_EVENTS = os.path.join(_OURS, "held_interrupts.py")  # waits on behalf of its caller, whose state counts
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
_PACKAGES = os.sep + "site-packages" + os.sep  # often inside the standard library's folder
_COMPILERS = tuple(
    os.path.join(_TORCH, *path) for path in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")


def look(ignored: int) -> tuple[str, str]:
    """Where the main thread is in the user's code, and "running", "working" or "waiting". `ignored` is our own thread.

    Running is the user's code; working this library or a compiler; waiting is in a collective, or for one.
    """
    with _nothing_collected():
        return _look(ignored)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    if not gc.isenabled() or sys.version_info >= (3, 12):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _look(ignored: int) -> tuple[str, str]:
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != ignored}
    main = frames.pop(threading.main_thread().ident or 0, None)
    states = [state for frame in frames.values() if (state := _state_of(frame)) != "running"]
    where = _place_in_users_code(main) if main is not None else ""
    own = _state_of(main) if main is not None else "running"
    if own == "running" and main is not None and main.f_code.co_filename == _BACKWARD:
        own = "waiting" if states else own  # a backward whose hooks run on autograd's own thread
    if "working" in (own, *states):
        return where, "working"
    return where, own


def _state_of(frame: FrameType | None) -> str:
    """The state of one thread. A thread without a frame of ours counts as running."""
    found = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name in _COMPILERS:
            return "working"
        if not found and not _is_transparent(name):
            found = "running" if not name.startswith(_OURS) else "waiting" if name.startswith(_WAITING) else "working"
        frame = frame.f_back
    return found or "running"


def _is_transparent(name: str) -> bool:
    return name == _EVENTS or name.startswith(_TORCH) or (name.startswith(_PYTHON) and _PACKAGES not in name)


def _place_in_users_code(frame: FrameType) -> str:
    innermost = frame
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        if not _is_transparent(name) and not name.startswith(_OURS):
            innermost = at
            break
        at = at.f_back
    code = innermost.f_code
    short = os.sep.join(code.co_filename.split(os.sep)[-2:])
    return f"{short}:{innermost.f_lineno} in {code.co_name}"
