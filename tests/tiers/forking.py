"""Runs a function in a forked child: gives what it returned, or says that it hung."""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

from tests.ranks import HANG_SECONDS


class Child:
    """A forked child that runs `function` and then ends, at once or through the interpreter's exit."""

    def __init__(self, function: Callable[[], Any], *, exits: bool = False) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is what is tested
            self.pid = os.fork()
        if self.pid == 0:
            _serve(function, write, exits=exits)
        os.close(write)

    def result(self) -> Any:
        """What the function returned, once the child has ended; a child that hangs is killed and reported."""
        parts = []
        while select.select([self._read], [], [], HANG_SECONDS)[0]:
            part = os.read(self._read, 1 << 16)
            if not part:
                break
            parts.append(part)
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise AssertionError("the child hung")
        os.close(self._read)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == 0, f"the child ended with {code}"
        return pickle.loads(b"".join(parts))


def _serve(function: Callable[[], Any], write: int, *, exits: bool) -> None:
    """In the child. Its pipe closes when it has ended, so that a hang at exit is seen as well."""
    try:
        result = pickle.dumps(function())
    except BaseException as error:
        result = pickle.dumps(error)
    os.write(write, result)
    if not exits:
        os._exit(0)
    # What a program that forks without `multiprocessing` does at its end, without pytest's own part of it.
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # the pool of ranks is the parent's
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)


def error_in_child(function: Callable[[], Any]) -> str:
    """The name and text of what the function raises in a forked child."""

    def caught() -> str:
        try:
            function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    return str(Child(caught).result())
