"""Host memory by the page: aligned anonymous buffers as tensors, faulting them in, and how much is free.

A buffer is its own mapping: exactly as large as asked (torch's pinned allocator rounds up to a power of two), zero
until written, on huge pages if the system gives them, and unmapped when its last tensor dies. A forked child finds
zeros there, so that it holds no copy of what its parent writes.
Pinning is not done here; whoever registers a buffer with a device must unregister it first.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.errors import BudgetError, PlanError
from unbounded.native.library import declare

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096  # the alignment that O_DIRECT asks for
HUGE_PAGE_BYTES = 2 << 20


@lru_cache(maxsize=1)
def _functions() -> tuple[ctypes._NamedFuncPointer, ...]:
    size, pointer, integer = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
    return (
        declare("unbounded_memory_map", pointer, [size, size, integer, ctypes.POINTER(integer)]),
        declare("unbounded_memory_unmap", integer, [pointer, size]),
        declare("unbounded_memory_touch", None, [pointer, size, ctypes.c_uint]),
    )


def host_buffer(nbytes: int, *, huge: bool = True) -> torch.Tensor:
    """A new uint8 tensor of `nbytes` zero bytes in its own mapping, page-aligned (2 MiB for large ones)."""
    import torch

    if nbytes < 0:
        raise PlanError(f"a host buffer of {nbytes} bytes was asked for. Ask for zero or more.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    map_memory, unmap_memory, _ = _functions()
    large = huge and nbytes >= HUGE_PAGE_BYTES
    error = ctypes.c_int()
    address = map_memory(nbytes, HUGE_PAGE_BYTES if large else PAGE_BYTES, int(large), ctypes.byref(error))
    if not address:
        raise BudgetError(
            f"the system refused {nbytes:,} bytes of host memory ({os.strerror(error.value)}). "
            f"Lower host_bytes; {available_bytes():,} bytes are available now."
        )
    owner = (ctypes.c_uint8 * nbytes).from_address(address)
    finalizer = weakref.finalize(owner, unmap_memory, address, nbytes)
    finalizer.atexit = False  # threads may still use it while the interpreter ends; the system unmaps it then
    return torch.frombuffer(owner, dtype=torch.uint8)


def touch(tensor: torch.Tensor, num_threads: int = 1) -> None:
    """Makes every page of a contiguous host tensor present, with `num_threads` threads, changing no value."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise PlanError("touch() was given a tensor that is not contiguous host memory. Pass a host_buffer().")
    if tensor.nbytes:
        _functions()[2](tensor.data_ptr(), tensor.nbytes, max(1, num_threads))


def available_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can still be taken: what the kernel calls available, within every cgroup's limit."""
    free = [_meminfo_available(proc)]
    for folder, names in _cgroup_folders(proc, cgroups):
        room = _cgroup_room(folder, *names)
        if room is not None:
            free.append(room)
    return max(0, min(free))


def _meminfo_available(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    value = fields.get("MemAvailable") or fields["MemFree"]
    return int(value.split()[0]) * 1024


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _cgroup_folders(proc: Path, cgroups: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The memory cgroups this process is in, each with its parents, and the names of their files."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        elif controllers == "":
            root, names = cgroups, _V2
        else:
            continue
        inside = Path(path.lstrip("/"))
        # A container may see its own cgroup as the root; folders that are not there are skipped.
        found += [(root / part, names) for part in [inside, *inside.parents]]
    return found


def _cgroup_room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # The page cache counts as used, but can be reclaimed.
    return int(limit) - usage + int(stat.get(cache_name, 0))
