"""A transfer in flight: what to wait for, which buffers it keeps alive, and how its failure is reported."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbounded.errors import DiskError, PlanError
from unbounded.native.disk.bindings import CHECKSUM_MISMATCH, SHORT_READ, disk
from unbounded.process import OwningProcess, finalize

if TYPE_CHECKING:
    import torch

_WAIT_SLICE_NS = 200_000_000  # Ctrl-C is seen between slices


@dataclass(frozen=True)
class Failure:
    """What went wrong first in a transfer: errno or a code of the core, and where in which file."""

    code: int
    run: int
    offset: int
    length: int


def byte_view(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size of a contiguous host tensor, or an error that says what it is instead."""
    if tensor.device.type != "cpu":
        raise PlanError(f"a disk transfer was given a tensor on {tensor.device}. Copy it to host memory first.")
    if not tensor.is_contiguous():
        raise PlanError(
            f"a disk transfer was given a tensor of shape {tuple(tensor.shape)} that is not contiguous. "
            "Pass tensor.contiguous(), or a view of a flat buffer."
        )
    return tensor.data_ptr(), tensor.nbytes


def disk_error(code: int, message: str, path: str) -> DiskError:
    """A DiskError that has errno and path and prints only `message`."""
    error = DiskError(message)
    error.errno, error.filename = code, path
    return error


def describe(failure: Failure, what: str, path: str) -> DiskError:
    """The exception for a failed transfer `what` ("read of file ...") at `path`."""
    place = f"{what} failed at offset {failure.offset} of {path}, {failure.length} bytes from there"
    if failure.code == SHORT_READ:
        message = f"{place}: the file ends before that. It was truncated, or more was asked for than it holds."
        return disk_error(errno.ENODATA, message, path)
    if failure.code == CHECKSUM_MISMATCH:
        message = f"{place}: the CRC32C differs from that of what was written. The disk or its link is faulty."
        return disk_error(errno.EBADMSG, message, path)
    remedy = _REMEDIES.get(failure.code, "Check the disk and the system's log.")
    text = f"{os.strerror(failure.code)} (errno {failure.code}, {errno.errorcode.get(failure.code, '?')})"
    return disk_error(failure.code, f"{place}: {text}. {remedy}", path)


_REMEDIES = {
    errno.ENOSPC: "Free space on that disk, or choose another path.",
    errno.EDQUOT: "Raise the quota, or choose another path.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or choose another filesystem.",
    errno.EAGAIN: "The system is out of threads or memory. Raise the limits (ulimit -u), or run less at the same time.",
    errno.EBADF: "It was opened read-only, or closed meanwhile. Open it for writing, and keep its descriptor open.",
}


def _release(started: ctypes.c_void_p, buffers: object) -> None:
    """Waits until the transfer is over; only then may the buffers be freed."""
    if started.value is not None:
        disk().release(started)


class DiskHandle:
    """One read or write in flight. Its buffers stay alive as long as it does, and it outlives the transfer.

    It is made before the transfer, which the core then puts into `started`: Ctrl-C may strike in between.
    """

    def __init__(self, explain: Callable[[Failure], DiskError], buffers: object) -> None:
        self.started = ctypes.c_void_p()
        self._explain = explain
        self._owner = OwningProcess()
        self._finalizer = finalize(self, _release, self.started, buffers)
        self._finalizer.atexit = False  # at exit finalizers run in no order of ownership; the system closes all

    def done(self) -> bool:
        """Whether the transfer is over, successfully or not."""
        return bool(disk().done(self.started))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the end and raises what went wrong. Any thread may call it, any number of times.

        With a timeout, returns False if that passes first.
        """
        self._owner.check("this disk transfer")
        deadline = None if timeout_seconds is None else time.monotonic_ns() + int(timeout_seconds * 1e9)
        functions = disk()
        while not functions.done(self.started):
            left = _WAIT_SLICE_NS if deadline is None else min(_WAIT_SLICE_NS, deadline - time.monotonic_ns())
            if left <= 0:
                return False
            functions.wait(self.started, left)
        self._check()
        return True

    def span_ns(self) -> tuple[int, int]:
        """When the first byte was asked for and when the last had arrived, on the clock of `time.monotonic_ns`."""
        span = (ctypes.c_int64 * 2)()
        disk().span(self.started, span)
        return span[0], span[1]

    def _check(self) -> None:
        where = (ctypes.c_uint64 * 3)()
        code = disk().result(self.started, where)
        if code:
            raise self._explain(Failure(code, *where))
