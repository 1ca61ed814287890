"""The engine that carries out transfers, and the named files on it.

States of an engine and of a file: open -> closed. Closing waits for what is in flight; using a closed one is an
error. O_DIRECT is used wherever the filesystem has it: unaligned memory goes through an
aligned buffer and the unaligned ends of a file through the page cache, so any offset and length works.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unbounded.errors import DiskError, PlanError
from unbounded.native.disk import place
from unbounded.native.disk.bindings import ALIGNMENT, READ, WRITE, disk
from unbounded.native.disk.checksum import Checksums
from unbounded.native.disk.handle import DiskHandle, Failure, byte_view, describe, disk_error
from unbounded.process import OwningProcess, finalize

if TYPE_CHECKING:
    import torch


class DiskRun(NamedTuple):
    """Contiguous bytes of a file and of memory; `sums` is the address of its slots for checksums, or 0."""

    file: int
    offset: int
    address: int
    length: int
    sums: int = 0


class DiskEngine:
    """Carries out reads and writes of files, many at once, in blocks, on threads.

    How many blocks are in flight, up to `num_threads`, is found while working, for every device and direction.
    With `niceness` above 0 the threads give way to the program's own.
    """

    def __init__(
        self,
        *,
        num_threads: int = 8,
        block_bytes: int = 8 << 20,
        direct: bool = True,
        niceness: int = 0,
    ) -> None:
        for name, value in (("num_threads", num_threads), ("block_bytes", block_bytes)):
            if value < 1:
                raise PlanError(f"{name} is {value}. It must be at least 1.")
        self.direct, self.block_bytes = direct, block_bytes
        self._owner = OwningProcess()
        self._pointer = disk().engine_open(num_threads, block_bytes, niceness)
        self._closed = False
        self._finalizer = finalize(self, disk().engine_release, self._pointer)
        self._finalizer.atexit = False  # at exit finalizers run in no order of ownership; the system closes all

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        read_only: bool = False,
        size_bytes: int | None = None,
    ) -> DiskFile:
        """Opens a file; `create` makes it if it is missing, `size_bytes` reserves and sets its length."""
        self.check_usable(str(path))
        existed = os.path.exists(path)
        descriptors = place.open_named(Path(path), create=create, read_only=read_only, direct=self.direct)
        if size_bytes is not None:
            try:
                place.reserve(descriptors.fd, size_bytes, str(path))
            except DiskError:
                descriptors.close()
                if not existed:
                    os.unlink(path)
                raise
        return DiskFile(self, str(path), descriptors)

    def submit(
        self,
        handle: DiskHandle,
        operation: int,
        runs: Sequence[DiskRun],
        *,
        padded: bool = False,
        grain_bytes: int = ALIGNMENT,
    ) -> DiskHandle:
        """Starts a transfer over `runs`, which belongs to `handle` from then on; returns that."""
        count = len(runs)
        files, offsets, addresses, lengths, sums = zip(*runs, strict=True)
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_uint64 * count
        code = disk().submit(
            self._pointer,
            operation,
            count,
            pointers(*files),
            sizes(*offsets),
            pointers(*addresses),
            sizes(*lengths),
            pointers(*sums) if any(sums) else None,
            grain_bytes,
            int(padded),
            ctypes.byref(handle.started),
        )
        if code:
            raise disk_error(code, f"a transfer could not start: {os.strerror(code)}.", "")
        return handle

    def check_usable(self, path: str) -> None:
        """Raises if the engine is closed, or belongs to the process that this one was forked from."""
        if self._closed:
            raise disk_error(errno.EBADF, f"the disk engine was closed, so {path} cannot be used. Open another.", path)
        self._owner.check(f"the disk engine with {path}")

    def is_here(self) -> bool:
        """Whether its threads run in this process."""
        return self._owner.is_here()

    def close(self) -> None:
        """Finishes what is in flight and ends the threads; a second call does nothing."""
        if not self._closed and self._owner.is_here():
            self._closed = True
            disk().engine_close(self._pointer)

    def __enter__(self) -> DiskEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class DiskFile:
    """An open file of an engine. Any offset and length works; aligned ones are faster."""

    def __init__(
        self, engine: DiskEngine, path: str, descriptors: place.Descriptors, *, temporary: bool = False
    ) -> None:
        self.path = path
        self.engine = engine
        self._fd = descriptors.fd
        self.pointer = disk().file_open(descriptors.fd, descriptors.direct_fd, int(temporary))
        self._closed = False
        self._finalizer = finalize(self, disk().file_release, self.pointer)
        self._finalizer.atexit = False  # at exit finalizers run in no order of ownership; the system closes all

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache; the filesystem may refuse O_DIRECT."""
        return bool(disk().file_direct(self.pointer))

    @property
    def size_bytes(self) -> int:
        self._check()
        return os.fstat(self._fd).st_size

    def read(self, offset: int, tensor: torch.Tensor, sums: Checksums | None = None) -> DiskHandle:
        """Starts filling `tensor` (contiguous, on the host) from `offset`; fewer bytes there is an error.

        With `sums`, the engine's threads verify what they have read; the wait raises (EBADMSG) if it differs.
        """
        return self._submit(READ, offset, tensor, sums)

    def write(self, offset: int, tensor: torch.Tensor, sums: Checksums | None = None) -> DiskHandle:
        """Starts writing `tensor`'s bytes at `offset`; the file grows if needed.

        With `sums`, the engine's threads put the checksums of what they write there, before it is written.
        """
        return self._submit(WRITE, offset, tensor, sums)

    def _submit(self, operation: int, offset: int, tensor: torch.Tensor, sums: Checksums | None) -> DiskHandle:
        self._check()
        if offset < 0:
            raise PlanError(f"offset {offset} of {self.path} is negative. Offsets count from the start of the file.")
        address, nbytes = byte_view(tensor)
        what = "read" if operation == READ else "write"

        def explain(failure: Failure) -> DiskError:
            return describe(failure, f"{what} of {nbytes} bytes at offset {offset}", self.path)

        handle = DiskHandle(explain, (tensor, self, sums))
        if sums is None:
            return self.engine.submit(handle, operation, [DiskRun(self.pointer, offset, address, nbytes)])
        self._check_sums(sums, offset, nbytes)
        run = DiskRun(self.pointer, offset, address, nbytes, sums.address)
        return self.engine.submit(handle, operation, [run], grain_bytes=sums.grain_bytes)

    def _check_sums(self, sums: Checksums, offset: int, nbytes: int) -> None:
        """The core checksums block by block, so a grain must be inside one block and the transfer on whole pages."""
        if self.engine.block_bytes % sums.grain_bytes or offset % ALIGNMENT or nbytes % ALIGNMENT:
            raise PlanError(
                f"{nbytes} bytes at offset {offset} of {self.path} cannot be checksummed in blocks of "
                f"{sums.grain_bytes} bytes during the transfer. Use whole pages of {ALIGNMENT} bytes and a divisor of "
                f"{self.engine.block_bytes}."
            )
        if len(sums) * sums.grain_bytes < nbytes:
            raise PlanError(
                f"{len(sums)} checksums of {sums.grain_bytes} bytes each do not cover {nbytes} bytes. Pass more."
            )

    def sync(self) -> None:
        """Waits until everything written and waited for is on stable storage."""
        self._check()
        code = disk().file_sync(self.pointer)
        if code:
            raise disk_error(code, f"fsync of {self.path} failed: {os.strerror(code)} (errno {code}).", self.path)

    def truncate(self, size_bytes: int) -> None:
        """Sets the file's length; wait for the transfers in flight first."""
        self._check()
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError as error:
            text = f"{self.path} could not be set to {size_bytes} bytes: {error.strerror} (errno {error.errno})."
            raise disk_error(error.errno or 0, text, self.path) from error

    def close(self) -> None:
        """Waits for the transfers in flight and closes; a second call does nothing."""
        if not self._closed and self.engine.is_here():
            self._closed = True
            disk().file_close(self.pointer)

    def _check(self) -> None:
        if self._closed:
            raise disk_error(errno.EBADF, f"{self.path} was used after it was closed. Open it again.", self.path)
        self.engine.check_usable(self.path)

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
