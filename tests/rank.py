"""What one rank of the pool (`tests/ranks.py`) does: wait for a case, run it in a clean setting, report."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Case:
    """One function to be run on all ranks, in its own process group."""

    name: str
    world_size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    timeout: float
    search_path: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        # The search path is set before the function's module is looked for.
        payload = pickle.dumps((self.function, self.arguments))
        return _rebuild, (self.name, self.world_size, payload, self.timeout, self.search_path)


def _rebuild(name: str, world_size: int, payload: bytes, timeout: float, search_path: list[str]) -> Case:
    sys.path[:] = search_path
    function, arguments = pickle.loads(payload)
    return Case(name, world_size, function, arguments, timeout, search_path)


@dataclass
class Report:
    """What a rank gives back: the function's result, or its traceback."""

    result: Any
    failure: str | None = None
    died: bool = False


def serve(pipe: Connection, log: str, port: int) -> None:
    """The life of a rank: cases from the pipe until it closes."""
    _redirect(log)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCH_DIST_INIT_BARRIER="1",  # no case may end, and close its connections, before every rank has connected
    )
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(message, store))


def _redirect(log: str) -> None:
    """Output and, on SIGUSR1 or a crash, the stacks of all threads go to the rank's log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _answer(message: bytes, store: Any) -> bytes:
    try:
        rank, case = pickle.loads(message)
        return pickle.dumps(_run(rank, case, store))
    except BaseException:
        return pickle.dumps(Report(None, traceback.format_exc()))


@cache
def _freeze(num_modules: int) -> None:
    """What is frozen is never collected, so nothing of the cases before may be left then."""
    gc.collect()
    gc.freeze()


def _freeze_modules() -> None:
    """Collections in a case look at what the case made, and not at the 100,000s of objects of imported modules."""
    _freeze(len(sys.modules))


def _run(rank: int, case: Case, store: Any) -> Report:
    _freeze_modules()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if case.world_size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(case.name, store),
            rank=rank,
            world_size=case.world_size,
            timeout=timedelta(seconds=case.timeout + 60),  # the pool sees a hang before gloo does
        )
    try:
        report = Report(case.function(rank, case.world_size, *case.arguments))
    except BaseException:
        report = Report(None, traceback.format_exc())
    # Collected while the group lives: if DDP's reducer were the last to hold the group, it would wait for the group's
    # threads while it has the GIL, for which they may wait.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # and what only the group held
    return report
