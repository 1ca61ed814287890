"""What this process holds, as the system sees it: memory, files, threads.

Memory is counted whatever allocator torch is built with. glibc gives large blocks back when they are freed, so the
growth of the resident set is what is held. mimalloc, which torch uses on aarch64, keeps them for the next allocation
unless memory is short: there the code runs inside a cgroup with the limit that the test promises, and must not be
killed in it. Files and threads are read while other threads open, close and end. What other threads give back is
waited for.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

CGROUPS = Path("/sys/fs/cgroup")
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


class Peak:
    """Watches how far the resident set grows inside the `with`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.grown_bytes = limit_bytes, 0
        self._over = threading.Event()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Peak:
        if keeps_freed_memory():
            self._exits.enter_context(limited(self.limit_bytes))
        else:
            first = resident_bytes()
            watcher = threading.Thread(target=self._watch, args=(first,), daemon=True)
            watcher.start()
            self._exits.callback(watcher.join)
            self._exits.callback(self._over.set)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def _watch(self, first: int) -> None:
        while not self._over.wait(0.001):
            self.grown_bytes = max(self.grown_bytes, resident_bytes() - first)


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """Inside, the process is in a cgroup that may take `limit_bytes` more; skips where it may not make one."""
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.split(":")[1] in ("memory", "")),
        "0::/",
    )
    controller, path = line.split(":")[1:]
    root = CGROUPS / controller
    own = root / f"unbounded-test-{os.getpid()}"
    try:
        own.mkdir()
        name = "memory.limit_in_bytes" if controller else "memory.max"
        (own / name).write_text(str(limit_bytes))
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            own.rmdir()
        pytest.skip(f"torch's allocator keeps freed memory, and no cgroup may be made to limit it: {error}")
    try:
        yield
    finally:
        back = root / path.lstrip("/")
        (back if back.is_dir() else root).joinpath("cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            own.rmdir()


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
