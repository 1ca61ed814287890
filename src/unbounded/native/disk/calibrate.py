"""Which backend to use on a device: threads, unless io_uring is allowed there and clearly faster.

For blocks of megabytes the two are level on most disks, since the cost of a system call vanishes; threads
pin pages in parallel and work everywhere, so a tie goes to them. The measurement is small (64 MiB, a fraction
of a second), reads what was just written, alternates the two, and is made once a device and process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.native.disk import place
from unbounded.native.disk.bindings import disk
from unbounded.native.memory import host_buffer

if TYPE_CHECKING:
    import torch

    from unbounded.native.disk.engine import DiskFile

SAMPLE_BYTES = 64 << 20
NUM_ROUNDS, BUDGET_SECONDS = 4, 0.3
CLEARLY_FASTER = 1.1

_chosen: dict[int, str] = {}  # by device


def faster_backend(folder: Path) -> str:
    """ "threads" or "io_uring", for files in `folder`."""
    try:
        device = os.stat(folder).st_dev
        if device not in _chosen:
            _chosen[device] = _choose(folder)
    except OSError:
        return "threads"
    return _chosen[device]


def _choose(folder: Path) -> str:
    if disk().probe_uring() or not os.access(folder, os.W_OK) or place.free_bytes(folder) < 4 * SAMPLE_BYTES:
        return "threads"
    seconds = _measure(folder)
    return "io_uring" if seconds["io_uring"] * CLEARLY_FASTER < seconds["threads"] else "threads"


def _measure(folder: Path) -> dict[str, float]:
    """The best time of each backend to read the sample."""
    from unbounded.native.disk.engine import DiskEngine, DiskFile

    sample = host_buffer(SAMPLE_BYTES)
    opened = place.open_anonymous(folder)
    with DiskEngine(backend="threads") as threads, DiskEngine(backend="io_uring") as uring:
        first = DiskFile(threads, str(folder), opened.fd, opened.direct_fd, "threads")
        fd = os.dup(opened.fd)
        second = DiskFile(uring, str(folder), fd, fd if first.is_direct else -1, "io_uring")
        with first, second:
            place.reserve(opened.fd, SAMPLE_BYTES, str(folder))
            first.write(0, sample).wait()
            return _alternate({"threads": first, "io_uring": second}, sample)


def _alternate(files: dict[str, DiskFile], sample: torch.Tensor) -> dict[str, float]:
    best = dict.fromkeys(files, float("inf"))
    deadline = time.monotonic() + BUDGET_SECONDS
    for _ in range(NUM_ROUNDS):
        for name, file in files.items():
            start = time.perf_counter()
            file.read(0, sample).wait()
            best[name] = min(best[name], time.perf_counter() - start)
        if time.monotonic() > deadline:  # a disk this slow is the same for both
            break
    return best
