"""Lanes run at the same time as the computation. A lane is one thread and, on CUDA, one stream, taking work in order.

`submit` returns a `Handle`. Code that uses the result on the device calls `order_stream`: the caller's stream waits for
the lane's, and the host only until the lane has launched the work. Code that uses it on the host calls `wait`. These
two verbs mean the same for everything in flight, and both raise what went wrong in the work, every time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from unbounded.errors import UnboundedError, again
from unbounded.held_interrupts import wait
from unbounded.process import OwningProcess, finalize


class Handle:
    """Work in flight. It keeps what it was given alive until the work is done."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # how long others have waited until it was launched
        self._launched = threading.Event()
        self.error: BaseException | None = None
        self._event: torch.cuda.Event | None = None
        self.result: Any = None

    def order_stream(self) -> Any:
        """Returns the work's result once it is launched, and makes the current stream wait for it; raises its error."""
        self.settle()
        if self.error is not None:
            raise again(self.error)
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self.result

    def wait(self) -> Any:
        """Like `order_stream`, but returns only when the device has finished the work too."""
        result = self.order_stream()
        if self._event is not None:
            self._event.synchronize()
        return result

    def settle(self) -> None:
        """Returns when the work was launched or has failed; its error stays with the handle."""
        if not self._launched.is_set():
            begin = time.perf_counter()
            wait(self._launched)
            self.waited_seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Returns when the work is done, on the device too, or has failed; its error stays with the handle."""
        self.settle()
        if self._event is not None:
            self._event.synchronize()

    def launched(self) -> bool:
        return self._launched.is_set()

    def done(self) -> bool:
        """Whether the work is done, on the device too, or has failed; waits for nothing."""
        return self._launched.is_set() and (self._event is None or self._event.query())

    def failed(self) -> bool:
        """Whether it has ended in an error; returns when that is known."""
        self.settle()
        return self.error is not None

    def complete(self, result: Any = None, event: torch.cuda.Event | None = None) -> None:
        """Called once by whoever does the work, when it was launched; `event` says when the device has done it."""
        self.result, self._event = result, event
        self._launched.set()

    def fail(self, error: BaseException) -> None:
        """Called instead of `complete` if the work could not be done."""
        self.error = error
        self._launched.set()


def finished(result: Any = None) -> Handle:
    """A handle on work that is already done."""
    handle = Handle()
    handle.complete(result)
    return handle


Task = tuple[Handle, Callable[..., Any], tuple[Any, ...]]


class Lane:
    """One thread and one stream that do what they are given, in order. The thread ends with the lane."""

    def __init__(self, name: str, device: torch.device, *, inline: bool = False) -> None:
        self.name, self.inline = name, inline
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not inline else None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._owner = OwningProcess()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Handle:
        """Hands `function` to the lane. An inline lane runs it at once, on the caller's thread and stream.

        If the system gives the lane no thread, the handle has failed, and the next call tries again.
        """
        self._owner.check(f"the lane {self.name!r} of a sharded model")
        handle = Handle()
        if self.inline:
            _run((handle, function, arguments), None)
        elif (error := self._start()) is not None:
            handle.fail(error)
        else:
            self._tasks.put((handle, function, arguments))
        return handle

    def _start(self) -> UnboundedError | None:
        if self._thread is not None:
            return None
        name = f"unbounded-{self.name}"
        thread = threading.Thread(target=_work, args=(self._tasks, self.stream), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return UnboundedError(
                f"the system gave no thread for the lane {self.name!r} of a sharded model. Raise the limit on "
                "processes (ulimit -u), or run less at the same time."
            )
        self._thread = thread
        finalize(self, _end, self._tasks, thread)
        return None

    def drain(self) -> None:
        """Returns when the lane has let go of everything that it was given so far."""
        if self._thread is not None and self._owner.is_here():
            self.submit(_do_nothing).finish()

    def mark(self) -> torch.cuda.Event | None:
        """An event that follows everything launched on the lane's stream so far."""
        return _mark(self.stream)


def _do_nothing() -> None:
    pass


def _end(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    """Ends a lane's thread, also at exit: a thread still inside torch would then abort the process."""
    tasks.put(None)
    if threading.current_thread() is not thread:
        thread.join()


def _work(tasks: queue.SimpleQueue[Task | None], stream: torch.cuda.Stream | None) -> None:
    """The lane's thread. It must not hold the lane itself, because it ends with the lane."""
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    while (task := tasks.get()) is not None:
        _run(task, stream)
        del task


def _run(task: Task, stream: torch.cuda.Stream | None) -> None:
    handle, function, arguments = task
    try:
        with torch.no_grad():  # grad mode is per thread, and lanes never build graphs
            result = function(*arguments)
        handle.complete(result, _mark(stream))
    except BaseException as error:
        handle.fail(error)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event
