"""What this process holds, as the system sees it: memory, files, threads.

Memory is counted whatever allocator torch is built with. glibc gives large blocks back when they are freed, so the
growth of the resident set is what is held. mimalloc, which torch uses on aarch64, keeps them for the next allocation
unless memory is short: there the code runs inside a cgroup with the limit that the test promises, and must not be
killed in it. Files and threads are read while other threads open, close and end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

CGROUPS = Path("/sys/fs/cgroup")
PROBE_BYTES = 8 << 20


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


def settled(count: int = 20, seconds: float = 0.2) -> tuple[int, int]:
    """The least number of threads and of descriptors over a while: some come for a moment and are not kept."""
    seen = []
    for _ in range(count):
        seen.append((len(threads()), len(open_files())))
        time.sleep(seconds / count)
    return min(number for number, _ in seen), min(number for _, number in seen)
