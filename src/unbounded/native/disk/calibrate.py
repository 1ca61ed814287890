"""Which backend to use on a device: threads, unless io_uring is allowed there and clearly faster.

For blocks of megabytes the two are level on most disks, since the cost of a system call vanishes; threads
pin pages in parallel and work everywhere, so a tie goes to them. The measurement is small (64 MiB, a fraction
of a second), reads what was just written, alternates the two, and is made once a device and process.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.native.disk.bindings import disk

if TYPE_CHECKING:
    import torch

    from unbounded.native.disk.engine import DiskFile

SAMPLE_BYTES = 64 << 20
BUDGET_SECONDS = 0.5
CLEARLY_FASTER = 1.1


def faster_backend(folder: Path) -> str:
    """ "threads" or "io_uring", for files in `folder`."""
    try:
        return _faster_on_device(os.stat(folder).st_dev, str(folder))
    except OSError:
        return "threads"


@lru_cache(maxsize=64)
def _faster_on_device(device: int, folder: str) -> str:
    if disk().probe_uring() or not os.access(folder, os.W_OK):
        return "threads"
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 4 * SAMPLE_BYTES:
        return "threads"
    seconds = _measure(Path(folder))
    return "io_uring" if seconds["io_uring"] * CLEARLY_FASTER < seconds["threads"] else "threads"


def _measure(folder: Path) -> dict[str, float]:
    """The best time of each backend to read the sample; infinite for io_uring on a disk too slow to measure."""
    from unbounded.errors import DiskError
    from unbounded.native.disk import place
    from unbounded.native.disk.engine import DiskEngine, DiskFile
    from unbounded.native.memory import host_buffer

    best = {"threads": float("inf"), "io_uring": float("inf")}
    sample = host_buffer(SAMPLE_BYTES)
    deadline = time.monotonic() + BUDGET_SECONDS
    try:
        with DiskEngine(backend="threads") as threads, DiskEngine(backend="io_uring") as uring:
            anonymous = place.open_anonymous(folder)
            place.reserve(anonymous.fd, SAMPLE_BYTES, str(folder))
            with DiskFile(threads, str(folder), anonymous.fd, anonymous.direct_fd, "threads") as first:
                first.write(0, sample).wait()
                fd = os.dup(anonymous.fd)
                with DiskFile(uring, str(folder), fd, fd if first.is_direct else -1, "io_uring") as second:
                    files = {"threads": first, "io_uring": second}
                    while time.monotonic() < deadline and not _settled(best):
                        for name, file in files.items():
                            best[name] = min(best[name], _read_seconds(file, sample))
    except DiskError:
        return {"threads": 0.0, "io_uring": float("inf")}
    return best


def _settled(best: dict[str, float]) -> bool:
    # Two are enough where they are level; a disk that reads the sample this slowly shows no difference at all.
    return best["threads"] < float("inf") and best["threads"] > BUDGET_SECONDS / 4


def _read_seconds(file: DiskFile, sample: torch.Tensor) -> float:
    start = time.perf_counter()
    file.read(0, sample).wait()
    return time.perf_counter() - start
