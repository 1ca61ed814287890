"""Threads of the native core that the host kernels run on.

A pool sleeps between jobs and never spins against torch's threads. Several Python threads may share one pool (they
take turns) or have their own. Results never depend on the number of threads. A pool belongs to the process that
made it: a forked child makes its own, and `default_pool` does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from unbounded.errors import PlanError, StateError, UnboundedError
from unbounded.launcher import read_local
from unbounded.native.library import declare
from unbounded.process import OwningProcess, finalize, module_lock

SIMD_VARIABLE = "UNBOUNDED_SIMD"


def simd() -> str:
    """The instruction set new pools use: the best of this machine, or what UNBOUNDED_SIMD asks for."""
    return _resolve(None)


def _resolve(wanted: str | None) -> str:
    name = wanted or os.environ.get(SIMD_VARIABLE, "")
    found: bytes | None = declare("unbounded_simd", ctypes.c_char_p, [ctypes.c_char_p])(name.encode())
    if found is None:
        raise PlanError(
            f'the instruction set "{name}" is not available on this machine. '
            f'Choose "avx512", "avx2", "neon" or "scalar" as the machine allows, or unset {SIMD_VARIABLE}.'
        )
    return found.decode()


class Pool:
    """`num_threads` threads, the caller's included; closed explicitly, as a context, or when collected."""

    def __init__(self, num_threads: int, *, simd: str | None = None) -> None:
        self._users = 0
        self._idle = threading.Condition()
        if num_threads < 1:
            raise PlanError(f"a pool of {num_threads} threads cannot work. Ask for at least 1.")
        self.num_threads = num_threads
        self.simd = _resolve(simd)
        create = declare("unbounded_pool_create", ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p])
        self._owner = OwningProcess()
        self._handle: int | None = create(num_threads, self.simd.encode())
        if self._handle is None:
            raise UnboundedError(
                f"a pool of {num_threads} threads could not be started. Raise the limit on processes, or ask for fewer."
            )
        close = declare("unbounded_pool_close", None, [ctypes.c_void_p])
        self._close = finalize(self, close, self._handle)
        self._close.atexit = False  # a lane may still be working; the system ends the threads

    @contextmanager
    def borrow(self) -> Iterator[int]:
        """The native handle, kept open until the block ends."""
        self._owner.check("this pool of threads")
        with self._idle:
            if self._handle is None:
                raise StateError("the pool is closed. Make a new Pool, or close it only after its last use.")
            self._users += 1
            handle = self._handle
        try:
            yield handle
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def is_here(self) -> bool:
        """Whether its threads run in this process."""
        return self._owner.is_here()

    def close(self) -> None:
        """Waits for the jobs in flight, then ends the threads; more than once is harmless."""
        if not self._owner.is_here():
            return
        with self._idle:
            self._handle = None
            self._idle.wait_for(lambda: self._users == 0)
        self._close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_default: Pool | None = None
_default_lock = module_lock()


def default_pool() -> Pool:
    """The default pool: this rank's share of the cores that the process may use."""
    global _default
    with _default_lock:
        if _default is None or not _default.is_here():
            _, num_ranks = read_local(os.environ)
            _default = Pool(max(1, len(os.sched_getaffinity(0)) // (num_ranks or 1)))
        return _default
