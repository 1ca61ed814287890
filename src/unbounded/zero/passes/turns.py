"""Threads: a sharded model is used by one at a time, and the others wait for their turn.

A pass belongs to the thread that began it, and to the threads that torch or the model itself start inside it. Whoever
else reads a weight, updates, or begins a pass waits until it is over: its weights come and go. Between two calls of a
pass to the engine the model computes, so what is locked is a call, and what is waited for is a pass. A stay inside
`full_params` is waited for in the same way.

What the engine computes in a call is its own: no dispatch mode of the user's sees it. Selective checkpointing is one,
and counts on seeing the same operations in the forward and when it is run again, while the engine gathers other units.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes

from unbounded.errors import StateError
from unbounded.held_interrupts import HeldBack, deliver
from unbounded.tiers.current_device import on_device
from unbounded.zero.passes import hooks
from unbounded.zero.passes.direction import Backward, Forward

PATIENCE_SECONDS = 120.0
"""After this long, a thread that waits for another's pass is taken to be one that the pass itself waits for."""

_POLL_SECONDS = 0.002
_NOTHING = nullcontext()


class Stay(Protocol):
    """What a thread may be inside of for longer than one call."""

    thread: threading.Thread

    @property
    def is_running(self) -> bool: ...


class Showing:
    """The stay inside `full_params`."""

    def __init__(self) -> None:
        self.thread, self.is_running = threading.current_thread(), False

    def set(self, is_running: bool) -> None:
        self.thread, self.is_running = threading.current_thread(), is_running


class _Guards(threading.local):
    """The current devices of this thread before its turns."""

    def __init__(self) -> None:
        self.held: list[AbstractContextManager[Any]] = []


class Turns:
    """Who may use the engine now. In a turn, the model's device is the current one."""

    def __init__(self, forward: Forward, backward: Backward, device: torch.device) -> None:
        self._device, self._guards = device, _Guards()
        self.lock = threading.Condition()  # held for the length of one call
        self._backward, self.showing = backward, Showing()
        self._stays: dict[str, Stay] = {"a forward": forward, "a backward": backward, "full_params": self.showing}

    def __enter__(self) -> None:
        """For whatever is not a part of a pass: inside, no other thread is in one, nor calls the engine."""
        self.lock.acquire()
        try:
            if self._other(*self._stays) and not (hooks.in_backward() or hooks.in_module_call()):
                self.wait_for_forward()
            guard = on_device(self._device)
            guard.__enter__()
            self._guards.held.append(guard)
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._guards.held.pop().__exit__(*error)
        finally:
            self.lock.release()

    def wait_for_forward(self) -> None:
        """Returns when this thread may begin a forward; the caller has the lock."""
        self._wait(*self._stays)

    def wait_for_backward(self) -> None:
        """Returns when this thread may begin a backward or is in the running one; the caller has the lock.

        It may begin inside its own forward, but not inside another thread's: where blocks run again, they would take
        each other's weights out of the modules.
        """
        if self._backward.is_running and (_is_torchs(self._backward.thread) or _is_torchs(threading.current_thread())):
            return  # torch's own threads are in the one that runs, whoever has begun it
        self._wait("a forward", "a backward")

    def _other(self, *names: str) -> str | None:
        """A stay of another thread, which still lives. A thread of torch's may work for the one that stays."""
        this = threading.current_thread()
        for name in names:
            stay = self._stays[name]
            if stay.is_running and stay.thread is not this and stay.thread.is_alive():
                if stay is self._backward and self._backward.is_broken:
                    return None
                return None if _is_torchs(this) and _waits_for_torch(stay.thread) else name
        return None

    def _wait(self, *names: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (name := self._other(*names)) is not None:
            if time.monotonic() > deadline:
                raise StateError(
                    f"thread {self._stays[name].thread.name!r} has been inside {name} of this sharded model for "
                    f"{PATIENCE_SECONDS:g} s, and thread {threading.current_thread().name!r} cannot use it until then. "
                    "If that thread waits for this one, do without threads there."
                )
            deliver()
            self.lock.wait(_POLL_SECONDS)


def _is_torchs(thread: threading.Thread) -> bool:
    """Whether torch has started it, as it does to run a backward on a GPU."""
    return isinstance(thread, threading._DummyThread)


def _waits_for_torch(thread: threading.Thread) -> bool:
    """Whether it has called for a backward, and does nothing until that is over."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def _unseen() -> AbstractContextManager[Any]:
    """Inside, dispatch modes of this thread and transforms of torch.func do not see what is computed."""
    is_seen = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return _without_watchers() if is_seen else _NOTHING


@contextmanager
def _without_watchers() -> Iterator[None]:
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the engine that no two threads are inside of."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_process()
        with HeldBack(), self.turns.lock, _unseen(), on_device(self.device):
            return method(self, *args, **kwargs)

    return call


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that uses the engine outside passes."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with HeldBack(), self.engine.turn(), _unseen():
            return method(self, *args, **kwargs)

    return call
