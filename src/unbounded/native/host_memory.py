"""Host memory by the page: aligned anonymous buffers as tensors, moving and faulting in their pages, how much is free.

A buffer is its own mapping: exactly as large as asked (torch's pinned allocator rounds up to a power of two), zero
until written, on huge pages if the system gives them, and unmapped when its last tensor dies. A forked child finds
zeros there, so that it holds no copy of what its parent writes.
Pinning is not done here; whoever registers a buffer with a device must unregister it first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.errors import BudgetError, PlanError
from unbounded.native.library import declare

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096  # the alignment that O_DIRECT asks for
HUGE_PAGE_BYTES = 2 << 20
# What the module mmap lacks.
PROT_NONE = 0
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4


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
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return as_tensor(map_pages(nbytes, huge=huge), nbytes, torch.uint8, partial(unmap_pages, nbytes=nbytes))


def map_pages(nbytes: int, *, huge: bool = True) -> int:
    """The address of a new mapping, of which no page is present yet."""
    large = huge and nbytes >= HUGE_PAGE_BYTES
    error = ctypes.c_int()
    address = _functions()[0](nbytes, HUGE_PAGE_BYTES if large else PAGE_BYTES, int(large), ctypes.byref(error))
    if not address:
        raise _refused("give", nbytes, error.value)
    return int(address)


def unmap_pages(address: int, nbytes: int) -> None:
    _functions()[1](address, nbytes)


def as_tensor(address: int, nbytes: int, dtype: torch.dtype, on_free: Callable[[int], object]) -> torch.Tensor:
    """A flat tensor over a mapping. `on_free` gets the address when the last tensor over it is gone."""
    import torch

    owner = (ctypes.c_uint8 * nbytes).from_address(address)
    finalizer = weakref.finalize(owner, on_free, address)
    finalizer.atexit = False  # threads may still use it while the interpreter ends; the system unmaps it then
    with torch.inference_mode(False):  # other threads write to it
        return torch.frombuffer(owner, dtype=dtype)


def hide_pages(address: int, nbytes: int) -> None:
    """Gives the pages back to the system. Whoever reads them before `show_pages` ends the process."""
    _protect(address, nbytes, PROT_NONE)
    if _system()[2](address, nbytes, mmap.MADV_DONTNEED):
        raise _refused("take back", nbytes, ctypes.get_errno())


def show_pages(address: int, nbytes: int) -> None:
    """Hidden pages may be used again. They are zero."""
    _protect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)


def move_pages(source: int, target: int, nbytes: int, *, hide: bool) -> bool:
    """Moves pages between mappings of equal size. The source is hidden or unmapped; False: the system cannot do it."""
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | (MREMAP_DONTUNMAP if hide else 0)
    if _system()[0](source, nbytes, nbytes, flags, target) != target:
        return False
    if hide:
        _protect(source, nbytes, PROT_NONE)
    return True


def _protect(address: int, nbytes: int, protection: int) -> None:
    if _system()[1](address, nbytes, protection):
        raise _refused("give", nbytes, ctypes.get_errno())


def _refused(verb: str, nbytes: int, error: int) -> BudgetError:
    return BudgetError(
        f"the system refused to {verb} {nbytes:,} bytes of host memory ({os.strerror(error)}). "
        f"Lower host_bytes; {available_bytes():,} bytes are available now."
    )


@lru_cache(maxsize=1)
def _system() -> tuple[ctypes._NamedFuncPointer, ...]:
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    # Those that take microseconds keep the GIL: getting it back takes far longer if another thread wants it.
    short, long = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
    short.mremap.argtypes, short.mremap.restype = [pointer, size, size, integer, pointer], pointer
    short.mprotect.argtypes = long.madvise.argtypes = [pointer, size, integer]
    return short.mremap, short.mprotect, long.madvise


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
