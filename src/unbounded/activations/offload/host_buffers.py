"""Host buffers for activations: cut from chunks of host memory that stay, and returned with the last reference.

Sizes repeat from block to block and from step to step, so a steady step allocates and pins nothing. A shorter sequence
takes parts of the chunks that a longer one needed; parts merge again when they are returned. If the budget allows no
new chunk, unused ones are freed first.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from unbounded.native.host_memory import PAGE_BYTES
from unbounded.tiers.room import Room


@dataclass(eq=False)
class _Part:
    """An unused run of a chunk; its next use must come after the events of its last uses."""

    start: int
    size: int
    after: tuple[torch.cuda.Event, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(eq=False)
class _Chunk:
    """Memory that was allocated at once, and its free parts in order."""

    raw: torch.Tensor
    free: list[_Part] = field(default_factory=list)

    @property
    def is_unused(self) -> bool:
        return len(self.free) == 1 and self.free[0].size == self.raw.numel()

    def cut(self, part: _Part, size: int) -> _Part:
        """Takes `size` bytes off the front of a free part."""
        taken = _Part(part.start, size, part.after)
        self.free.remove(part)
        if part.size > size:
            self._insert(_Part(part.start + size, part.size - size, part.after))
        return taken

    def give_back(self, part: _Part) -> None:
        """Joins a part with free neighbours."""
        for other in [other for other in self.free if other.stop == part.start or part.stop == other.start]:
            self.free.remove(other)
            events = tuple(dict.fromkeys((*part.after, *(event for event in other.after if not event.query()))))
            part = _Part(min(part.start, other.start), part.size + other.size, events)
        self._insert(part)

    def _insert(self, part: _Part) -> None:
        self.free = sorted([*self.free, part], key=lambda one: one.start)


class Buffer:
    """A run of host memory. Dropping it returns it, to be written again after the events in `after`."""

    __slots__ = ("_chunk", "_home", "_part")

    def __init__(self, chunk: _Chunk, part: _Part, home: deque[tuple[_Chunk, _Part]]) -> None:
        self._chunk, self._part, self._home = chunk, part, home

    def __del__(self) -> None:
        self._home.append((self._chunk, self._part))  # no lock, because this may run whenever memory is collected

    @property
    def after(self) -> tuple[torch.cuda.Event, ...]:
        return self._part.after

    @after.setter
    def after(self, events: tuple[torch.cuda.Event, ...]) -> None:
        self._part.after = events

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        start = self._part.start
        return self._chunk.raw[start : start + numel * dtype.itemsize].view(dtype)


class HostBuffers:
    """The buffers of one model, in the room that its plan leaves."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._chunks: list[_Chunk] = []
        self._returned: deque[tuple[_Chunk, _Part]] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, pin: bool = False) -> Buffer:
        """A buffer of at least `num_bytes`; a BudgetError before anything is allocated if there is no room."""
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            self._collect()
            fits = ((chunk, part) for chunk in self._chunks for part in chunk.free if part.size >= size)
            best = min(fits, key=lambda fit: fit[1].size, default=None)
            chunk, part = best or self._allocate(size, pin=pin)
            return Buffer(chunk, chunk.cut(part, size), self._returned)

    def has_room(self, num_bytes: int) -> bool:
        """Whether `take` would find so much, or may allocate it."""
        with self._lock:
            self._collect()
            parts = (part.size for chunk in self._chunks for part in chunk.free)
            size = num_bytes + PAGE_BYTES
            return max(parts, default=0) >= size or self.room.spare_bytes(size) >= size

    def trim(self) -> None:
        """Frees the chunks that are not in use."""
        with self._lock:
            self._collect()
            self._free_unused()

    def _collect(self) -> None:
        while self._returned:
            chunk, part = self._returned.popleft()
            chunk.give_back(part)

    def _allocate(self, size: int, *, pin: bool) -> tuple[_Chunk, _Part]:
        if self.room.spare_bytes() < size:
            self._free_unused()
        if self.room.spare_bytes(size) < size:
            raise self.room.shortage(size)
        chunk = _Chunk(self.room.arena.allocate(torch.uint8, size, pin=pin), [_Part(0, size)])
        self.room.count(size)
        self._chunks.append(chunk)
        return chunk, chunk.free[0]

    def _free_unused(self) -> None:
        for chunk in [chunk for chunk in self._chunks if chunk.is_unused]:
            for event in chunk.free[0].after:
                event.synchronize()
            self._chunks.remove(chunk)
            self.room.arena.release(chunk.raw)
            self.room.count(-chunk.raw.numel())
