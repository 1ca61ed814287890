"""Ways to make a disk fail: small and read-only mounts, a device that loses its end, calls that lie, seccomp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import HANG_SECONDS
from unbounded.native.disk import Extent, ExtentStore
from unbounded.native.disk.striping import parts

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>

// The next `fault_count` calls fail with `fault_errno`, or move `fault_bytes` at most where it is not 0.
int fault_count, fault_errno;
long fault_bytes;

static ssize_t call(const char* name, int fd, const struct iovec* vector, int count, off_t offset) {
  ssize_t (*real)(int, const struct iovec*, int, off_t) = dlsym(RTLD_NEXT, name);
  if (__atomic_load_n(&fault_count, __ATOMIC_SEQ_CST) > 0) {
    __atomic_fetch_sub(&fault_count, 1, __ATOMIC_SEQ_CST);
    if (fault_errno) { errno = fault_errno; return -1; }
    size_t bytes = (fault_bytes + 4095) / 4096 * 4096;  // what O_DIRECT accepts; less of it is reported
    struct iovec less = {vector->iov_base, vector->iov_len < bytes ? vector->iov_len : bytes};
    ssize_t moved = real(fd, &less, 1, offset);
    return moved < fault_bytes ? moved : fault_bytes;
  }
  return real(fd, vector, count, offset);
}
ssize_t preadv(int fd, const struct iovec* v, int n, off_t o) { return call("preadv", fd, v, n, o); }
ssize_t pwritev(int fd, const struct iovec* v, int n, off_t o) { return call("pwritev", fd, v, n, o); }
ssize_t preadv64(int fd, const struct iovec* v, int n, off_t o) { return call("preadv64", fd, v, n, o); }
ssize_t pwritev64(int fd, const struct iovec* v, int n, off_t o) { return call("pwritev64", fd, v, n, o); }
"""


def build_shim(folder: Path) -> Path:
    """A library to preload that makes preadv and pwritev fail or fall short on demand."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter and gives its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


@contextmanager
def mounted_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    mount(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextmanager
def loop_device(image: Path, size_bytes: int) -> Iterator[str]:
    """A block device over `image`; truncating the image makes its lost blocks answer EIO."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    device = mount(["losetup", "--find", "--show", str(image)]).strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


def mount(command: list[str]) -> str:
    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(f"needs root and {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is not allowed here: {done.stderr.strip()}")
    return done.stdout


def flip_bit(store: ExtentStore, extent: Extent, position: int) -> None:
    """Changes one bit of the disk under byte `position` of an extent."""
    part = next(parts(extent, position // 4096 * 4096, 4096))
    fd = os.open(f"/proc/self/fd/{store._files[part.path]._fd}", os.O_RDWR)
    offset = part.offset + position % 4096
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ 4]), offset)
    os.fsync(fd)
    os.close(fd)
