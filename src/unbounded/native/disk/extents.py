"""The disk tier's store: extents in preallocated files that end with the process.

There is one anonymous file per path, fully reserved at the start. Reads and writes of one extent are not ordered:
wait for a write before reading it, and for both before freeing. States: open -> closed.

Checksums are kept in memory, four bytes for every page of a file: a write puts them there, and a read that finds
other bytes on the disk fails. A page that was never written reads as zeros, and its slot is zero (see `Run` in
native/disk/transfer.h), so slots take memory only if something was written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.errors import DiskError, PlanError, StateError
from unbounded.native.disk import place
from unbounded.native.disk.bindings import ALIGNMENT, READ, WRITE
from unbounded.native.disk.handle import DiskHandle, Failure, byte_view, describe, disk_error
from unbounded.native.disk.io_engine import DiskEngine, DiskFile, DiskRun
from unbounded.native.disk.striping import STRIPE_BYTES, Extent, FreeList, lane_bytes, parts, round_up
from unbounded.native.host_memory import host_buffer

if TYPE_CHECKING:
    import torch

SLOT_BYTES = 4

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class ExtentStore:
    """Extents of any size on one or several paths, striped over them, with their CRC32C checked on reading.

    The whole `capacity_bytes` is taken at once; a path without the room raises ENOSPC with what is short. An extent
    takes its size rounded up to 4096 bytes (on every path it is striped over).
    """

    def __init__(
        self, paths: Paths, capacity_bytes: int, *, checksum: bool = True, engine: DiskEngine | None = None
    ) -> None:
        if capacity_bytes < 1:
            raise PlanError(f"capacity_bytes is {capacity_bytes}. A disk store needs at least one byte.")
        self.folders = _as_folders(paths)
        self.capacity_bytes = capacity_bytes
        for folder in self.folders:
            place.check_folder(folder)
        self._owns_engine = engine is None
        self.engine = engine or DiskEngine()
        share = round_up(-(-capacity_bytes // len(self.folders)), ALIGNMENT)
        # Striping is even to within one stripe (see `striping`), so each path has room for one more than its share.
        self._file_bytes = share if len(self.folders) == 1 else share + STRIPE_BYTES
        self._named: list[Path] = []
        self._files: list[DiskFile] = []
        self._free = [FreeList(self._file_bytes) for _ in self.folders]
        self._extents: dict[int, Extent] = {}
        num_slots = self._file_bytes // ALIGNMENT if checksum else 0
        self._sums = [host_buffer(SLOT_BYTES * num_slots) for _ in self.folders]
        self._next_number = 0
        self._lock = threading.Lock()
        self._closed = False
        try:
            for folder in self.folders:
                self._files.append(self._open(folder))
        except DiskError:
            self.close()
            raise

    def _open(self, folder: Path) -> DiskFile:
        descriptors = place.open_anonymous(folder, self._file_bytes, direct=self.engine.direct)
        if descriptors.named:
            self._named.append(descriptors.named)
        return DiskFile(self.engine, str(folder), descriptors, temporary=True)

    @property
    def free_bytes(self) -> int:
        """What is not taken by extents, without the slack for uneven stripes."""
        with self._lock:
            free = sum(spans.free_bytes for spans in self._free)
        return max(0, free - (self._file_bytes * len(self.folders) - self.capacity_bytes))

    @property
    def checksum_bytes(self) -> int:
        """The host memory that the checksums take once everything has been written."""
        return sum(sums.numel() for sums in self._sums)

    @property
    def is_direct(self) -> bool:
        """Whether every path bypasses the page cache."""
        return all(file.is_direct for file in self._files)

    def allocate(self, nbytes: int) -> Extent:
        """A new extent of `nbytes`; what it holds is undefined until written, unless it `is_new`."""
        self._check_open()
        if nbytes < 1:
            raise PlanError(f"an extent of {nbytes} bytes was asked for. Ask for at least one byte.")
        with self._lock:
            order = sorted(range(len(self._free)), key=lambda path: -self._free[path].free_bytes)
            lanes = self._take(order, lane_bytes(nbytes, len(self._free)))
            if lanes is not None:
                were_new = [spans.claim(lane) for spans, lane in zip(self._free, lanes, strict=True)]
                extent = Extent(self._next_number, nbytes, tuple(order), lanes, all(were_new))
                self._next_number += 1
                self._extents[extent.number] = extent
                return extent
        raise disk_error(
            errno.ENOSPC,
            f"an extent of {nbytes:,} bytes does not fit the disk store on {self._where()}: {self.free_bytes:,} of its "
            f"{self.capacity_bytes:,} bytes are free. Raise disk_bytes, or free extents first.",
            self._where(),
        )

    def _take(self, order: list[int], sizes: list[int]) -> tuple[tuple, ...] | None:  # type: ignore[type-arg]
        lanes: list[tuple] = [()] * len(sizes)  # type: ignore[type-arg]
        for path, size in zip(order, sizes, strict=True):
            spans = self._free[path].take(size)
            if spans is None:
                self._give(lanes)
                return None
            lanes[path] = spans
        return tuple(lanes)

    def _give(self, lanes: Iterable[tuple]) -> None:  # type: ignore[type-arg]
        for path, spans in enumerate(lanes):
            for span in spans:
                self._free[path].give(span)

    def free(self, extent: Extent) -> None:
        """Gives the extent's space back; no transfer of it may be in flight."""
        self._check_open()
        with self._lock:
            self._check_known(extent)
            del self._extents[extent.number]
            self._give(extent.lanes)

    def read(self, extent: Extent, tensor: torch.Tensor, offset: int = 0) -> DiskHandle:
        """Starts filling `tensor` from the extent at `offset`; wait() raises if a checksum differs."""
        return self._submit(READ, extent, tensor, offset)

    def write(self, extent: Extent, tensor: torch.Tensor, offset: int = 0) -> DiskHandle:
        """Starts writing `tensor`'s bytes into the extent at `offset`."""
        return self._submit(WRITE, extent, tensor, offset)

    def _submit(self, operation: int, extent: Extent, tensor: torch.Tensor, offset: int) -> DiskHandle:
        self._check_open()
        self._check_known(extent)
        address, nbytes = byte_view(tensor)
        self._check_range(extent, nbytes, offset)
        pieces = list(parts(extent, offset, nbytes))
        if not pieces:
            raise PlanError(f"extent {extent.number} was given an empty tensor. Pass at least one byte.")
        runs = [
            DiskRun(
                self._files[part.path].pointer,
                part.offset,
                address + part.start - offset,
                part.length,
                self._slot(part.path, part.offset),
            )
            for part in pieces
        ]
        what = f"{'read' if operation == READ else 'write'} of extent {extent.number}"

        def explain(failure: Failure) -> DiskError:
            part = pieces[failure.run]
            inside = part.start + failure.offset - part.offset
            return describe(failure, f"{what} at its offset {inside}", str(self.folders[part.path]))

        handle = DiskHandle(explain, (tensor, self._sums, self._files))
        return self.engine.submit(handle, operation, runs, padded=True)

    def _slot(self, path: int, offset: int) -> int:
        """The address of the checksum of the page at `offset` of a path's file; 0 if none are kept."""
        sums = self._sums[path]
        return sums.data_ptr() + offset // ALIGNMENT * SLOT_BYTES if sums.numel() else 0

    def _check_range(self, extent: Extent, nbytes: int, offset: int) -> None:
        end = offset + nbytes
        if offset < 0 or end > extent.nbytes:
            raise PlanError(
                f"bytes {offset} to {end} are not all in extent {extent.number}, which has {extent.nbytes}. "
                "Pass a tensor that fits, or another offset."
            )
        if offset % ALIGNMENT or (nbytes % ALIGNMENT and end != extent.nbytes):
            raise PlanError(
                f"bytes {offset} to {end} of extent {extent.number} are not in multiples of {ALIGNMENT}. "
                "Align the offset, and the length unless it reaches the extent's end."
            )

    def _check_known(self, extent: Extent) -> None:
        if self._extents.get(extent.number) is not extent:
            raise StateError(
                f"extent {extent.number} of {extent.nbytes} bytes is not in this store: it was freed, or belongs to "
                "another one. Use extents only with the store that allocated them."
            )

    def _check_open(self) -> None:
        if self._closed:
            text = f"the disk store on {self._where()} was used after it was closed. Open another."
            raise disk_error(errno.EBADF, text, self._where())
        self.engine.check_usable(self._where())

    def _where(self) -> str:
        return ", ".join(str(folder) for folder in self.folders)

    def close(self) -> None:
        """Waits for the transfers in flight and frees the disk space; a second call does nothing."""
        if self._closed or not self.engine.is_here():
            return
        self._closed = True
        for file in self._files:
            file.close()
        for path in self._named:
            with contextlib.suppress(OSError):
                path.unlink()
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> ExtentStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_folders(paths: Paths) -> tuple[Path, ...]:
    items = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not items:
        raise PlanError("no disk path was given. Give a folder, or several to stripe over.")
    return tuple(Path(item) for item in items)
