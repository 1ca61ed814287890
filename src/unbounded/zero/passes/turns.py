"""Threads: a sharded model is used by one at a time, and the others wait for their turn.

A pass belongs to the thread that began it, and to the threads that torch or the model itself start inside it. Whoever
else reads a weight, updates, or begins a pass waits until it is over: its weights come and go. Between two calls of a
pass to the engine the model computes, so what is locked is a call, and what is waited for is a pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from unbounded.errors import StateError
from unbounded.zero.passes import hooks
from unbounded.zero.passes.direction import Backward, Forward

PATIENCE_SECONDS = 120.0
"""After this long, a thread that waits for another's pass is taken to be one that the pass itself waits for."""

_POLL_SECONDS = 0.002


class Turns:
    """Who may use the engine now."""

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self.lock = threading.Condition()  # held for the length of one call
        self._forward, self._backward = forward, backward

    def __enter__(self) -> None:
        """For whatever is not a part of a pass: inside, no other thread is in one, nor calls the engine."""
        self.lock.acquire()
        try:
            if self._other(self._forward, self._backward) and not (hooks.in_backward() or hooks.in_module_call()):
                self.wait_for_forward()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def wait_for_forward(self) -> None:
        """Returns when this thread may begin a forward; the caller has the lock."""
        self._wait(self._forward, self._backward)

    def wait_for_backward(self) -> None:
        """Returns when this thread may begin a backward or is in the running one; the caller has the lock.

        It may begin inside another thread's forward, as it may inside its own.
        """
        other = self._other(self._backward)
        if other is not None and not (_is_torchs(other.thread) or _is_torchs(threading.current_thread())):
            self._wait(self._backward)

    def _other(self, *passes: Forward | Backward) -> Forward | Backward | None:
        """A pass that runs and was begun by another thread, which still lives."""
        for each in passes:
            if each.is_running and each.thread is not threading.current_thread() and each.thread.is_alive():
                return None if each is self._backward and self._backward.is_broken else each
        return None

    def _wait(self, *passes: Forward | Backward) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (other := self._other(*passes)) is not None:
            if time.monotonic() > deadline:
                raise StateError(
                    f"thread {other.thread.name!r} has been inside a {type(other).__name__.lower()} of this sharded "
                    f"model for {PATIENCE_SECONDS:g} s, and thread {threading.current_thread().name!r} cannot use the "
                    "model until it is over. If that pass waits for this thread, do without threads there."
                )
            self.lock.wait(_POLL_SECONDS)


def _is_torchs(thread: threading.Thread) -> bool:
    """Whether autograd has started it, to run backwards of any thread: it is in the one that runs."""
    return isinstance(thread, threading._DummyThread)


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the engine that no two threads are inside of."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_process()
        with self.turns.lock:
            return method(self, *args, **kwargs)

    return call


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that uses the engine outside passes."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.turn():
            return method(self, *args, **kwargs)

    return call
