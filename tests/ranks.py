"""A persistent pool of ranks for the tests: a case over four ranks costs milliseconds, not seconds.

The ranks are forked from a server that has torch imported already, and wait on a pipe for their next case.
Every case gets its own process group (gloo on loopback, with its own prefix for keys in one store that the pool
hosts); world size 1 gets none at all. What a case leaves cannot reach the next one: after a failure, a death or a
hang, or when threads are left over, the whole pool is replaced.

    results = run_ranks(2, function, *arguments)     # [function(0, 2, *arguments), function(1, 2, *arguments)]

The function and its arguments are pickled, so the function must be at the top level of a module.
What the ranks do with a case is in `tests/rank.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rank import Case, Report, serve

PRELOAD = [
    *("torch", "torch.distributed", "torch._dynamo", "torch.testing", "pytest", "tests.rank"),
    *("unbounded.sharding.placing", "unbounded.planning.choosing"),
    *("unbounded.checkpoint.saving", "unbounded.checkpoint.loading"),
]
"""What the fork server imports before the first rank; a test module adds to it with `PRELOAD_IN_RANKS`."""

MAX_RANKS = 4
GRACE_SECONDS = 60.0
"""How long the other ranks of a case may take to end after one has failed."""

HANG_SECONDS = 600.0
"""However busy the machine is, a case that ends at all has ended by then."""

MOST_THREADS = 60
"""Of a rank between two cases. One that waits has 20 to 30."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message has every failing rank's traceback or stacks."""


class Worker:
    """One rank's process, its pipe and the file that takes its output and its stacks."""

    def __init__(self, context: Any, rank: int, folder: Path, port: int) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(self.log), port), daemon=True)
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """What every thread of the rank is doing, written by its own faulthandler."""
        start = self.log.stat().st_size if self.log.exists() else 0
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline, sizes = time.monotonic() + 30.0, [start]
        while time.monotonic() < deadline and (sizes[-1] == start or len(set(sizes[-5:])) > 1):
            time.sleep(0.05)
            sizes.append(self.log.stat().st_size)
        return self.log.read_text(errors="replace")[start:]

    def output(self) -> str:
        """The end of what the rank wrote; of a crash also the beginning, which has the thread that crashed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        _, crash, stacks = text.rpartition("Fatal Python error")
        return f"{crash}{stacks[:8000]}\n...\n{stacks[-4000:]}" if crash else text[-4000:]

    def num_threads(self) -> int:
        with contextlib.suppress(OSError):  # it has just died, which the next case shows
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        return 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child that a test has forked
        shutil.rmtree(folder, ignore_errors=True)


class Pool:
    """Up to `MAX_RANKS` waiting ranks, started when a case first needs them."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        atexit.register(_remove, self.folder, os.getpid())
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(PRELOAD))
        self.workers: list[Worker] = []
        self.num_cases = 0

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = HANG_SECONDS
    ) -> list[Any]:
        """Runs `function(rank, world_size, *arguments)` on every rank; a list of what they returned."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"a case may have 1 to {MAX_RANKS} ranks, not {world_size}")
        # What failed in a collective on purpose keeps its groups and lanes, which wake up hundreds of times a second.
        if any(worker.num_threads() > MOST_THREADS for worker in self.workers):
            self.close()
        self._start(world_size)
        self.num_cases += 1
        case = Case(f"case{self.num_cases}", world_size, function, arguments, timeout, list(sys.path))
        ranks = self.workers[:world_size]
        for worker in ranks:
            worker.pipe.send_bytes(pickle.dumps((worker.rank, case)))
        reports = self._collect(ranks, timeout)
        failures = [report for report in reports.values() if report.failure]
        if failures or len(reports) < world_size:
            self._fail(ranks, reports, timeout)
        return [reports[worker.rank].result for worker in ranks]

    def close(self) -> None:
        """Ends every rank; the next case starts new ones."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def _start(self, world_size: int) -> None:
        for rank in range(len(self.workers), world_size):
            self.workers.append(Worker(self.context, rank, Path(self.folder), self.store.port))

    def _collect(self, ranks: list[Worker], timeout: float) -> dict[int, Report]:
        """The reports in the order in which they came; without those of ranks that died or did not end in time."""
        waiting = {worker.pipe: worker for worker in ranks}
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                worker = waiting.pop(pipe)  # type: ignore[index]
                try:
                    report = pickle.loads(worker.pipe.recv_bytes())
                except EOFError:
                    worker.process.join(60)
                    report = Report(None, f"the process died with exit code {worker.process.exitcode}", died=True)
                reports[worker.rank] = report
                if report.failure:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return reports

    def _fail(self, ranks: list[Worker], reports: dict[int, Report], timeout: float) -> None:
        parts = []
        for rank, report in reports.items():
            if report.failure:
                output = f"\n{ranks[rank].output()}" if report.died else ""
                parts.append(f"--- rank {rank} failed:\n{report.failure}{output}")
        hung = [worker for worker in ranks if worker.rank not in reports]
        waited = f"{GRACE_SECONDS:g} s after the failure above" if parts else f"within {timeout:g} s"
        for worker in hung:
            parts.append(f"--- rank {worker.rank} did not end {waited}; its stacks:\n{worker.stacks()}")
        self.close()
        raise RankError("\n".join(parts))


_pool: Pool | None = None


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = HANG_SECONDS
) -> list[Any]:
    """`Pool.run` on the one pool of this test session."""
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool.run(world_size, function, *arguments, timeout=timeout)


def close_ranks() -> None:
    """Ends the pool of this test session, if there is one."""
    if _pool is not None:
        _pool.close()
