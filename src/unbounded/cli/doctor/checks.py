"""What `unbounded doctor` checks: one function per finding, none of which raises."""

from __future__ import annotations

import os
import platform
import resource
import warnings
from pathlib import Path

from unbounded.cli.doctor.finding import BROKEN, NOTE, OK, Finding
from unbounded.errors import DiskError, UnboundedError

GIB = 1 << 30
OLDEST_TORCH = (2, 10)
_NEWER = f"Install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer."


def python_and_torch() -> Finding:
    value = f"Python {platform.python_version()}, {platform.machine()}"
    try:
        import torch
    except ImportError as error:
        return Finding("python", BROKEN, f"{value}, no torch ({error})", _NEWER)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    value += f", torch {torch.__version__}"
    if release < OLDEST_TORCH:
        return Finding("python", BROKEN, value, _NEWER)
    return Finding("python", OK, value)


def native_core() -> Finding:
    from unbounded.native import library

    try:
        path = Path(library.core()._name)
    except (UnboundedError, OSError) as error:
        return Finding("native core", BROKEN, str(error), "Reinstall with `pip install .`, which builds it.")
    return Finding("native core", OK, path.name)


def simd() -> Finding:
    from unbounded.native.disk.bindings import disk

    checksum = disk().crc32c_kernel().decode()
    kernel = _optimizer_kernel()
    value = f"optimizers {kernel}, checksums {checksum}"
    if kernel == "scalar":
        return Finding("simd", NOTE, value, "No AVX2, AVX-512 or NEON was found, so host updates will be slow.")
    return Finding("simd", OK, value)


def _optimizer_kernel() -> str:
    from unbounded.native import kernels

    return str(kernels.simd())


def disk_path(folder: str) -> list[Finding]:
    """The path itself, O_DIRECT on it, and the space there."""
    from unbounded.native.disk import place

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            place.check_folder(Path(folder))
        free = place.free_bytes(Path(folder))
        direct = _try_out(Path(folder))
    except DiskError as error:
        fact, _, remedy = str(error).rpartition(". ")
        return [Finding("disk path", BROKEN, fact or str(error), remedy)]
    kind = place.filesystem(Path(folder))
    where = f"{os.path.realpath(folder)} ({kind})"
    if caught:
        fact, _, remedy = str(caught[0].message).rpartition(". ")
        findings = [Finding("disk path", NOTE, fact, remedy)]
    else:
        findings = [Finding("disk path", OK, where)]
    remedy = (
        ""
        if direct
        else f"{kind} refuses O_DIRECT, so transfers go through the page cache. Choose a folder on ext4 or xfs."
    )
    findings.append(Finding("O_DIRECT", OK if direct else NOTE, "yes" if direct else "no", remedy))
    short = free < GIB
    findings.append(
        Finding(
            "disk free",
            NOTE if short else OK,
            f"{free / GIB:.1f} GiB",
            "Free space there, or give another disk_path." if short else "",
        )
    )
    return findings


def _try_out(folder: Path) -> bool:
    """Writes and reads one extent: whether O_DIRECT is in use."""
    from unbounded.native.disk import ExtentStore
    from unbounded.native.host_memory import host_buffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said already by check_folder
        store = ExtentStore(folder, 1 << 20)
    with store:
        extent = store.allocate(1 << 20)
        buffer = host_buffer(1 << 20)
        store.write(extent, buffer).wait()
        store.read(extent, buffer).wait()
        return store.is_direct


def host_memory() -> Finding:
    from unbounded.native.host_memory import available_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = available_bytes()
    value = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB, {os.cpu_count()} cores"
    if free < GIB:
        return Finding("host memory", NOTE, value, "Less than 1 GiB is free. End other programs, or raise the limit.")
    return Finding("host memory", OK, value)


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    try:
        modes = setting.read_text()
    except OSError:
        return Finding("huge pages", OK, "unknown")
    mode = modes[modes.find("[") + 1 : modes.find("]")]
    if mode == "never":
        remedy = f"Run `echo madvise > {setting}`: huge pages make large buffers faster to touch and copy."
        return Finding("huge pages", NOTE, mode, remedy)
    return Finding("huge pages", OK, mode)


def memory_lock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memory lock limit", OK, "unlimited")
    value = f"{soft >> 10:,} KiB"
    if soft < 1 << 20:
        remedy = (
            "Run `ulimit -l unlimited`: otherwise pinned memory for a GPU may be refused, which makes transfers slower."
        )
        return Finding("memory lock limit", NOTE, value, remedy)
    return Finding("memory lock limit", OK, value)


def gpus() -> list[Finding]:
    """One finding per GPU; if there is none, why."""
    try:
        import torch
    except ImportError:
        return []
    if torch.cuda.is_available():
        return [_gpu(index) for index in range(torch.cuda.device_count())]
    if torch.version.cuda is None:
        drivers = Path("/proc/driver/nvidia").exists()
        remedy = (
            "This torch is the CPU build, but there is an NVIDIA driver. Install torch for CUDA." if drivers else ""
        )
        return [Finding("gpu", NOTE if drivers else OK, "none: the device tier is ordinary memory", remedy)]
    remedy = "torch is built for CUDA but sees no GPU. Check `nvidia-smi`, the driver and CUDA_VISIBLE_DEVICES."
    return [Finding("gpu", NOTE, "none visible", remedy)]


def _gpu(index: int) -> Finding:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return Finding(f"gpu {index}", BROKEN, str(error).splitlines()[0], "Reset the GPU or restart its driver.")
    name = torch.cuda.get_device_name(index)
    return Finding(f"gpu {index}", OK, f"{name}, {free / GIB:.1f} GiB free of {total / GIB:.1f} GiB")
