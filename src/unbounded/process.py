"""Which process a thing belongs to.

A fork (a data worker, a subprocess, `multiprocessing`) copies memory, but no threads, no GPU and no place among the
ranks. Lanes, pools, disk engines and sharded models therefore belong to the process that made them, and keep an
`OwningProcess` that says so. The parent goes on as if there had been no fork. The child may make its own. If it uses
its parent's, it gets an error at once; what it merely inherits, it neither waits for nor frees.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from unbounded.errors import StateError


class OwningProcess:
    """The process that it was made in."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process, and not a child of it."""
        return os.getpid() == self.pid

    def check(self, what: str) -> None:
        """Raises in a process that was forked from the owner. Called before anything that could wait."""
        if os.getpid() != self.pid:
            raise StateError(
                f"{what} belongs to process {self.pid}, but this is process {os.getpid()}, forked from it. A fork "
                "copies no threads, no GPU and no connections to other ranks. Use it in the process that made it, or "
                "make another one here."
            )


def finalize(target: Any, function: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Like `weakref.finalize`, except that a forked child does not call `function`, because it frees nothing."""
    return weakref.finalize(target, _call_at_home, OwningProcess(), function, arguments)


def _call_at_home(owner: OwningProcess, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if owner.is_here():
        function(*arguments)


def module_lock() -> threading.Lock:
    """A lock for the state of a module. A child always finds it free, because a fork waits for its holder."""
    lock = threading.Lock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
