"""Reading data files: large asynchronous reads of whole checksum blocks, each verified before anyone uses it.

The threads of the disk engine verify what they have read while the next reads go on; a wait for a read ends only
when its bytes are the ones that were written.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from unbounded.checkpoint.format.manifest import PAGE, FileEntry, Manifest, TensorEntry
from unbounded.checkpoint.format.slices import plan_blocks
from unbounded.errors import CheckpointError, DiskError
from unbounded.native.disk import Checksums, DiskEngine, DiskFile, DiskHandle, crc32c
from unbounded.native.host_memory import host_buffer

CHUNK_BYTES = 16 << 20
# How much is read ahead of small reads that follow each other, and for how many files the last such read is kept.
AHEAD_BYTES, MOST_RECENT = 1 << 20, 8


# For threads that save during training: they use idle moments, and a tenth of a busy core.
NICENESS = 10


def disk_engine(*, in_background: bool = False) -> DiskEngine:
    """The process's engine for checkpoints. It is kept, because it learns how many transfers suit a disk.

    The one for work in the background has threads that give way to those of training.
    """
    return _engine_of(os.getpid(), in_background)


@lru_cache(maxsize=2)
def _engine_of(pid: int, in_background: bool) -> DiskEngine:
    return DiskEngine(niceness=NICENESS if in_background else 0)


class Read:
    """Whole blocks of a file being read into memory. `wait` returns when they have arrived and are verified."""

    def __init__(self, files: Files, number: int, offset: int, target: torch.Tensor) -> None:
        self._files, self._place = files, (number, offset, target)
        self._sums = files.expected(number, offset, target.numel())
        self._handle: DiskHandle = files.opened(number).read(offset, target, self._sums)

    def wait(self) -> None:
        try:
            self._handle.wait()
        except DiskError as error:
            if error.errno == errno.EBADMSG:
                self._files.verify(*self._place)  # says which block it is and what is in it
            raise
        if self._sums is None:
            self._files.verify(*self._place)

    def span_ns(self) -> tuple[int, int]:
        return self._handle.span_ns()


class Files:
    """The data files of one checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[int, DiskFile] = {}
        self._recent: dict[int, tuple[int, torch.Tensor]] = {}  # by file: the blocks read last and where they begin

    def check_present(self) -> None:
        """Raises unless every file is there, a plain one with its length."""
        wrong = []
        for file in self.manifest.files:
            path = self.folder / file.name
            try:
                held = os.stat(path)
            except FileNotFoundError as error:
                wrong.append(f"{file.name} cannot be read ({error.strerror})")
                continue
            except OSError as error:
                text = f"{path} cannot be read: {error.strerror} (errno {error.errno}). Check the disk."
                told = DiskError(text)
                told.errno, told.filename = error.errno, str(path)
                raise told from error
            if not stat.S_ISREG(held.st_mode):
                wrong.append(f"{file.name} is not a plain file")
            elif held.st_size != file.nbytes:
                wrong.append(f"{file.name} has {held.st_size:,} bytes instead of {file.nbytes:,}")
        if wrong:
            raise CheckpointError(
                f"the checkpoint in {self.folder} is incomplete: {'; '.join(wrong[:8])}. Copy it again."
            )

    def read(self, number: int, offset: int, target: torch.Tensor) -> Read:
        """Starts filling `target` with whole blocks of file `number` from byte `offset` on."""
        return Read(self, number, offset, target)

    def opened(self, number: int) -> DiskFile:
        if number not in self._open:
            path = self.folder / self.manifest.files[number].name
            self._open[number] = disk_engine().open(path, read_only=True)
        return self._open[number]

    def expected(self, number: int, offset: int, nbytes: int) -> Checksums | None:
        """The checksums of whole blocks at `offset`, or None if a shorter block lies between others."""
        file = self.manifest.files[number]
        first, last = bisect_left(file.edges, offset), bisect_left(file.edges, offset + nbytes)
        if first == last or file.edges[last - 1] != offset + (last - first - 1) * file.block_bytes:
            return None
        if disk_engine().block_bytes % file.block_bytes or nbytes % PAGE:
            return None
        return Checksums(file.block_bytes, file.crc32c[first:last])

    def verify(self, number: int, offset: int, data: torch.Tensor) -> None:
        """Raises unless `data`, whole blocks read at `offset`, has the checksums it was written with."""
        file = self.manifest.files[number]
        index, end = bisect_left(file.edges, offset), offset + data.numel()
        while file.edges[index] < end:
            start, stop = file.edges[index : index + 2]
            if crc32c(data[start - offset : stop - offset]) != file.crc32c[index]:
                raise CheckpointError(
                    f"{self.folder / file.name} is damaged: the CRC32C of its bytes {start} to {stop} differs from "
                    f"the one at writing ({self._names(number, start, stop)}). "
                    "Load another checkpoint, or copy this one again."
                )
            index += 1

    def read_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A small tensor whole, verified, in host memory."""
        values = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_range(entry, 0, values.numel(), values.reshape(-1))
        return values

    def read_range(self, entry: TensorEntry, start: int, stop: int, target: torch.Tensor) -> None:
        """Elements [start, stop) of a flattened tensor into `target` (flat, host memory), verified."""
        if start == stop:
            return
        itemsize, raw = entry.dtype.itemsize, target.view(torch.uint8)
        for run in entry.runs.covering(start, stop):
            nbytes = (run.stop - run.start) * itemsize
            begin, blocks = self._read_around(run.file, run.offset, run.offset + nbytes)
            position, inside = (run.start - start) * itemsize, run.offset - begin
            raw[position : position + nbytes].copy_(blocks[inside : inside + nbytes])

    def _read_around(self, number: int, start: int, stop: int) -> tuple[int, torch.Tensor]:
        """Whole blocks of a file around bytes [start, stop), verified, and where they begin.

        The rows of a matrix that was cut across them are a few hundred bytes apart, and each is asked for by itself. A
        read that closely follows the last one therefore reads some bytes beyond it, where the next one will find its
        own.
        """
        first, held = self._recent.get(number, (0, None))
        if held is not None and first <= start and stop <= first + held.numel():
            return first, held
        file, found = self.manifest.files[number], None
        if held is not None and first <= start <= first + held.numel() + AHEAD_BYTES:
            next_start = bisect_right(file.starts, start)
            end = file.starts[next_start] if next_start < len(file.starts) else file.nbytes
            with suppress(CheckpointError, DiskError):  # may include bytes that nobody asked for
                found = self._read_blocks(number, start, max(stop, min(start + AHEAD_BYTES, end)))
        found = found if found is not None else self._read_blocks(number, start, stop)
        if found[1].numel() <= 2 * AHEAD_BYTES:
            self._recent[number] = found
            while len(self._recent) > MOST_RECENT:
                self._recent.pop(next(iter(self._recent)))
        return found

    def _read_blocks(self, number: int, start: int, stop: int) -> tuple[int, torch.Tensor]:
        (blocks,) = plan_blocks([(start, stop)], self.manifest.files[number].edges, 0)
        buffer = host_buffer(blocks.stop - blocks.start)
        self.read(number, blocks.start, buffer).wait()
        return blocks.start, buffer

    def verify_all(self) -> None:
        """Reads every file once, a few chunks ahead, and verifies every block."""
        buffers: deque[torch.Tensor] = deque(host_buffer(CHUNK_BYTES) for _ in range(4))
        pending: deque[Read] = deque()
        for number, file in enumerate(self.manifest.files):
            for start, stop in _chunks(file):
                if len(pending) == len(buffers):
                    pending.popleft().wait()
                buffers.rotate()
                pending.append(self.read(number, start, buffers[0][: stop - start]))
        while pending:
            pending.popleft().wait()

    def _names(self, number: int, start: int, stop: int) -> str:
        """The tensors in these bytes, for the message."""
        names = [
            f"{entry.kind} of {entry.name}" if entry.kind != "value" else "values"
            for entry in self.manifest.tensors.values()
            if any(s.file == number and s.offset < stop and s.offset + s.nbytes > start for s in entry.slices)
        ]
        if not names:
            return "padding"
        return ", ".join(dict.fromkeys(names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._recent.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _chunks(file: FileEntry) -> Iterator[tuple[int, int]]:
    """The file in stretches of whole blocks that fit a buffer and do not cross a start."""
    for first, last in zip(file.starts, [*file.starts[1:], file.nbytes], strict=True):
        for start in range(first, last, CHUNK_BYTES):
            yield start, min(start + CHUNK_BYTES, last)
