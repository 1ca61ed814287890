"""Reading data files: large asynchronous reads of whole checksum blocks, each verified before anyone uses it."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import torch

from unbounded.checkpoint.manifest import Manifest, TensorEntry
from unbounded.checkpoint.slices import plan_extents
from unbounded.errors import CheckpointError
from unbounded.native.disk import DiskEngine, DiskFile, DiskHandle, crc32c
from unbounded.native.memory import host_buffer

# For transfers of megabytes threads and io_uring are level, and finding out costs half a second of a first save.
BACKEND = "threads"


class Files:
    """The data files of one checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._engine: DiskEngine | None = None
        self._open: dict[int, DiskFile] = {}

    def check_present(self) -> None:
        """Raises unless every file is there with its length."""
        wrong = []
        for file in self.manifest.files:
            try:
                held = os.stat(self.folder / file.name).st_size
            except OSError as error:
                wrong.append(f"{file.name} cannot be read ({error.strerror})")
                continue
            if held != file.nbytes:
                wrong.append(f"{file.name} has {held:,} bytes and not {file.nbytes:,}")
        if wrong:
            raise CheckpointError(
                f"the checkpoint in {self.folder} is incomplete: {'; '.join(wrong)}. Copy it again, or load another."
            )

    def read(self, number: int, offset: int, target: torch.Tensor) -> DiskHandle:
        """Starts filling `target` from byte `offset` of file `number`."""
        if number not in self._open:
            if self._engine is None:
                self._engine = DiskEngine(backend=BACKEND)
            path = self.folder / self.manifest.files[number].name
            self._open[number] = self._engine.open(path, read_only=True)
        return self._open[number].read(offset, target)

    def verify(self, number: int, offset: int, data: torch.Tensor) -> None:
        """Raises unless `data`, read at `offset` (on a block), has the checksums it was written with."""
        file = self.manifest.files[number]
        first = offset // file.block_bytes
        for index, block in enumerate(data.split(file.block_bytes), first):
            if crc32c(block) != file.crc32c[index]:
                start = index * file.block_bytes
                raise CheckpointError(
                    f"{self.folder / file.name} is damaged: the CRC32C of its bytes {start} to "
                    f"{start + block.numel()} differs from the one they were written with "
                    f"({self._names(number, start, start + block.numel())}). Load another checkpoint, or copy this "
                    "one again."
                )

    def read_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A small tensor whole, verified, in host memory."""
        values = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_range(entry, 0, values.numel(), values.reshape(-1))
        return values

    def read_range(self, entry: TensorEntry, start: int, stop: int, target: torch.Tensor) -> None:
        """Elements [start, stop) of a flattened tensor into `target` (flat, host memory), verified."""
        if start == stop:
            return
        itemsize, raw = entry.dtype.itemsize, target.view(torch.uint8)
        for run in entry.run_map().covering(start, stop):
            nbytes = (run.stop - run.start) * itemsize
            sizes = [file.nbytes for file in self.manifest.files]
            block = self.manifest.files[run.file].block_bytes
            (extent,) = plan_extents([(run.file, run.offset, run.offset + nbytes)], block, sizes, 0)
            buffer = host_buffer(extent.stop - extent.start)
            self.read(run.file, extent.start, buffer).wait()
            self.verify(run.file, extent.start, buffer)
            position = (run.start - start) * itemsize
            inside = run.offset - extent.start
            raw[position : position + nbytes].copy_(buffer[inside : inside + nbytes])

    def verify_all(self) -> None:
        """Reads every file once, a few chunks ahead, and verifies every block."""
        chunk_bytes = 16 << 20
        buffers = [host_buffer(chunk_bytes) for _ in range(4)]
        pending: deque[tuple[int, int, torch.Tensor, DiskHandle]] = deque()

        def finish() -> torch.Tensor:
            number, offset, data, read = pending.popleft()
            read.wait()
            self.verify(number, offset, data)
            return data

        for number, file in enumerate(self.manifest.files):
            for offset in range(0, file.nbytes, chunk_bytes):
                if len(pending) == len(buffers):
                    finish()
                data = buffers[(offset // chunk_bytes + number) % len(buffers)]
                data = data[: min(chunk_bytes, file.nbytes - offset)]
                pending.append((number, offset, data, self.read(number, offset, data)))
            while pending:
                finish()

    def _names(self, number: int, start: int, stop: int) -> str:
        """The tensors that lie in these bytes, for the message."""
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
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
