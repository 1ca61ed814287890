"""What this process holds, as the system sees it: memory, files, threads.

The resident set is what is held if whatever is freed is given back to the system at once. glibc does that with large
blocks, and mimalloc, which torch uses on aarch64, with `MIMALLOC_PURGE_DELAY=0` in the environment before torch is
loaded: `conftest.py` puts it there for ranks and other processes that tests start. Files and threads are read while
other threads open, close and end. What other threads give back is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

PROBE_BYTES = 8 << 20
PATIENCE_SECONDS = 120.0
"""However busy the machine is, what other threads and processes do at all they have done by then."""


def resident_bytes() -> int:
    """The process's anonymous memory: files that are mapped, libraries among them, cost nothing."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def keeps_freed_memory() -> bool:
    """Whether what torch frees stays in the process."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # glibc: a mapping of its own for every block that is not small
    before = resident_bytes()
    for _ in range(4):
        torch.ones(PROBE_BYTES, dtype=torch.uint8)
    return resident_bytes() - before > PROBE_BYTES // 2


class ThreadLimit:
    """While it is reached, threads of this name do not start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.is_reached, self.num_refused, start = True, 0, threading.Thread.start

        def start_some(thread: threading.Thread) -> None:
            if self.is_reached and thread.name == name:
                self.num_refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_some)


class Peak:
    """Watches how far the resident set grows inside the `with`."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._over = threading.Event()

    def __enter__(self) -> Peak:
        assert not keeps_freed_memory(), "start this process with MIMALLOC_PURGE_DELAY=0: torch keeps what it frees"
        self._watcher = threading.Thread(target=self._watch, args=(resident_bytes(),), daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self, first: int) -> None:
        while not self._over.wait(0.001):
            self.grown_bytes = max(self.grown_bytes, resident_bytes() - first)


def open_files() -> list[str]:
    """What every descriptor is open on. One that closed since it was listed is left out."""
    held = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.append(os.readlink(f"/proc/self/fd/{number}"))
    return held


def threads() -> dict[int, str]:
    """The name of every thread, Python's or not, by its number. One that ended since it was listed is left out."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def held() -> tuple[int, int]:
    """The number of threads and of descriptors at this moment."""
    return len(threads()), len(open_files())


def settled(
    *, threads: int | None = None, files: int | None = None, count: int = 20, seconds: float = 0.2
) -> tuple[int, int]:
    """The least number of threads and of descriptors over a while: some come for a moment and are not kept.

    Goes on for as long as there are more than `threads` and `files`: others may take their time to end.
    """

    def is_over() -> bool:
        seen.append(held())
        enough = len(seen) >= count
        return enough and (threads is None or least(0) <= threads) and (files is None or least(1) <= files)

    def least(which: int) -> int:
        return min(numbers[which] for numbers in seen)

    seen: list[tuple[int, int]] = []
    eventually(is_over, seconds / count)
    return least(0), least(1)


def eventually(happens: Callable[[], bool], pause_seconds: float = 0.01) -> bool:
    """Whether it happens, for which other threads and processes have a long time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (is_over := happens()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
    return is_over


def is_freed(*references: weakref.ref[object], collects: bool = True) -> bool:
    """Whether all of them are gone, for which a lane may still have to give a reference back."""

    def happens() -> bool:
        if collects:
            gc.collect()
        return all(reference() is None for reference in references)

    return eventually(happens)


def free_port() -> int:
    """A port that nobody uses, and that the system gives to no connection by itself until it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, first - 16384), first)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
