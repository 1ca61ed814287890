"""Who waits for a save in the background, and for how long.

A save reads states where they are, so an update that would overwrite them has to wait until they have been read. If the
host has room, it need not wait for the disk: the part of its unit that has not been read yet is copied aside, and the
save reads the copy. The update then waits only for what is being written at that moment. With a GPU, steps leave cores
idle, so a thread of the save makes these copies before the update comes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from unbounded.checkpoint.save.segments import FileSegment, WriteChunk
from unbounded.errors import BudgetError, CheckpointError, UnboundedError
from unbounded.native import kernels
from unbounded.tiers.array import MemoryArray
from unbounded.tiers.reader import Reader
from unbounded.tiers.tiers import Tiers

# Enough to stay ahead of a step's update, and few enough to leave memory bandwidth to the transfers of the step.
COPY_THREADS = 4


@dataclass(eq=False)
class _Watched:
    """One reader: its segments, how many of their chunks have not been read, and how many are being read now."""

    reader: Reader
    may_copy: bool
    segments: list[FileSegment] = field(default_factory=list)
    num_left: int | None = None
    num_begun: int = 0
    is_aside: bool = False
    copying: threading.Lock = field(default_factory=threading.Lock)

    def end_if_over(self) -> None:
        if (self.num_left == 0 or (self.is_aside and self.num_begun == 0)) and not self.reader.launched():
            self.reader.complete()


class Readers:
    """The readers of one save. `close` ends all waits and frees the memory of the copies."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._watched: dict[int, _Watched] = {}
        self._copies: dict[int, MemoryArray] = {}  # by the segment's identity
        self._lock = threading.Lock()

    def new(self, *, may_copy: bool) -> Reader:
        reader = Reader(self._set_aside if may_copy else None)
        self._watched[id(reader)] = _Watched(reader, may_copy)
        return reader

    def watch(self, segments: Sequence[FileSegment]) -> None:
        """Sets the segments that will be written. A reader without any is finished."""
        for segment in segments:
            if segment.reader is not None:
                self._watched[id(segment.reader)].segments.append(segment)
        for watched in self._watched.values():
            if not watched.segments:
                watched.reader.complete()

    def expect(self, chunks: Sequence[WriteChunk]) -> None:
        """Sets the chunks in which all of them will be read."""
        with self._lock:
            for watched in self._watched.values():
                watched.num_left = 0
            for chunk in chunks:
                for watched in self._of(chunk):
                    watched.num_left = (watched.num_left or 0) + 1

    def begin(self, chunk: WriteChunk) -> None:
        """Called before the chunk's memory is read."""
        with self._lock:
            for watched in self._of(chunk):
                watched.num_begun += 1

    def end(self, chunk: WriteChunk) -> None:
        """The chunk was read, so its memory may change."""
        with self._lock:
            for watched in self._of(chunk):
                assert watched.num_left is not None
                watched.num_left -= 1
                watched.num_begun -= 1
                watched.end_if_over()

    def copy_ahead(self) -> None:
        """Copies everything aside, beginning with what would be read last, up to what is being read."""
        try:
            pool = kernels.Pool(COPY_THREADS)
        except UnboundedError:  # no threads are left: updates then wait, or copy for themselves
            return
        with pool:
            for watched in reversed(self._watched.values()):
                if watched.may_copy and not watched.reader.launched():
                    self._set_aside(watched.reader, pool)

    def refuse_spoiled(self) -> None:
        """Raises if something has changed while it was read."""
        for watched in self._watched.values():
            if watched.reader.spoiled:
                raise CheckpointError(
                    f"{watched.reader.spoiled} while a save in the background was reading them, so the checkpoint "
                    "would be half old and half new. Save again; from now on such writes wait for the save."
                )

    def close(self) -> None:
        for watched in self._watched.values():
            if not watched.reader.launched():
                watched.reader.complete()
        while self._copies:
            _, copy = self._copies.popitem()
            num_bytes = copy.numel * copy.dtype.itemsize
            copy.free()
            self._tiers.return_host(num_bytes)

    def _of(self, chunk: WriteChunk) -> list[_Watched]:
        readers = {id(part.segment.reader) for part in chunk.parts if part.segment.reader is not None}
        return [self._watched[key] for key in readers]

    def _set_aside(self, reader: Reader, pool: kernels.Pool | None) -> None:
        """Copies a reader's segments that are in memory, while there is room. When all are copied, it is finished."""
        watched = self._watched[id(reader)]
        with watched.copying:
            if watched.is_aside:
                return
            if not all(segment.is_in_host_memory and self._copy(segment, pool) for segment in watched.segments):
                return
            with self._lock:
                watched.is_aside = True
                watched.end_if_over()

    def _copy(self, segment: FileSegment, pool: kernels.Pool | None) -> bool:
        """Copies what later chunks will read; False if there is no room."""
        if id(segment) in self._copies:
            return True
        (array, start), arena = segment.place, self._tiers.arena
        assert array.direct is not None
        if not self._tiers.borrow_host(segment.nbytes):
            return False
        try:
            copy = MemoryArray(arena.allocate(array.dtype, segment.numel, pin=False), "host", arena.release)
        except BudgetError:  # the system has less than the budget says; waiting works too
            self._tiers.return_host(segment.nbytes)
            return False
        self._copies[id(segment)] = copy
        kernels.copy(array.direct[start : start + segment.numel], copy.tensor, pool)
        segment.place = (copy, 0)
        return True
