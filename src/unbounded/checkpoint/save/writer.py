"""Writes one rank's data file: arrays of any tier pass through bounded buffers into large aligned writes.

    read     | c2 | c3 |              states on disk or on a GPU into staging buffers
    write         | c0 | c1 |         CRC32C of every block, then the write, on the threads of the disk engine

A chunk inside one array in host memory is written from there. This thread never touches large data itself, because it
may share the interpreter with a training loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from unbounded.checkpoint.format.data_files import CHUNK_BYTES
from unbounded.checkpoint.format.manifest import BLOCK_BYTES, FileEntry
from unbounded.checkpoint.save.readers import Readers
from unbounded.checkpoint.save.segments import FileSegment, WriteChunk, cut_chunks, lay_out
from unbounded.held_interrupts import deliver
from unbounded.native.disk import Checksums, DiskFile
from unbounded.observe import trace
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.pool import BufferPool

# Chunks being written: enough to keep the disk busy while this thread waits for a core.
DEPTH = 8


class Writer:
    """Writes segments into one file. `staging` must be free; all of it is returned, even after a failure."""

    def __init__(self, file: DiskFile, staging: BufferPool, readers: Readers) -> None:
        self.file, self.staging, self.readers = file, staging, readers
        self._pipeline = ItemPipeline(self, num_ahead=staging.count // 2, num_unfinished=DEPTH, pool=staging)

    def write(self, name: str, segments: Sequence[FileSegment]) -> FileEntry:
        """Writes all segments, waits for them and syncs the file."""
        layout = lay_out(segments)
        chunks = list(cut_chunks(segments, layout, min(CHUNK_BYTES, self.staging.buffer_bytes)))
        self.readers.expect(chunks)
        self._pipeline.run(chunks)
        self.file.sync()
        sums = [value for chunk in chunks if chunk.sums is not None for value in chunk.sums.values()]
        return FileEntry(name, layout.nbytes, BLOCK_BYTES, layout.starts, tuple(sums))

    # -- stages of the pipeline ------------------------------------------------------------------------------------

    def read(self, chunk: WriteChunk) -> None:
        """Starts bringing a chunk into a buffer, unless it can be written from where it is."""
        if chunk.is_direct:
            return
        chunk.lease = self._pipeline.lease()
        self.readers.begin(chunk)
        chunk.bytes = chunk.lease.tensor(torch.uint8, chunk.nbytes)
        position = 0
        for part in chunk.parts:
            chunk.bytes[position : part.position].zero_()
            position = part.position + part.stop - part.start
            array, start = part.segment.place
            target = chunk.bytes[part.position : position].view(array.dtype)
            chunk.waits.append(array.fetch(target, start + part.start // array.dtype.itemsize))
        chunk.bytes[position:].zero_()

    def work(self, chunk: WriteChunk) -> None:
        deliver()
        if chunk.lease is None:
            self.readers.begin(chunk)
            chunk.bytes = chunk.direct_bytes()
        else:
            for wait in chunk.waits:
                wait.wait()
            chunk.waits.clear()
            self.readers.end(chunk)
        chunk.sums = Checksums.empty(BLOCK_BYTES, chunk.nbytes)
        chunk.writing = self.file.write(chunk.offset, chunk.bytes, chunk.sums)

    def finish(self, chunk: WriteChunk) -> None:
        assert chunk.writing is not None
        chunk.writing.wait()
        start, stop = chunk.writing.span_ns()
        trace.record("disk write", "checkpoint", start, stop, bytes=chunk.nbytes)
        if chunk.lease is None:
            self.readers.end(chunk)
        self._let_go(chunk)

    def abandon(self, chunk: WriteChunk) -> None:
        for wait in [*chunk.waits, *([chunk.writing] if chunk.writing else [])]:
            with contextlib.suppress(Exception):
                wait.wait()
        chunk.waits.clear()
        self._let_go(chunk)

    def _let_go(self, chunk: WriteChunk) -> None:
        chunk.writing, chunk.bytes = None, chunk.bytes[:0]
        if chunk.lease is not None:
            chunk.lease.release()
            chunk.lease = None
