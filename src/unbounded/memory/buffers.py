"""Host buffers for activations: taken, given back when the last reference dies, and used again.

Sizes repeat from block to block and from step to step, so a steady step allocates and pins nothing. A buffer up to
twice as large as asked for is used as well; with sequences of varying length the buffers settle at the longest.
Where the budget allows no new one, unused ones of the wrong size are freed first.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque

import torch

from unbounded.tiers.room import Room

PAGE = 4096
Returned = tuple[torch.Tensor, torch.cuda.Event | None]


class Buffer:
    """A run of host memory. Dropping it gives it back, to be written again behind `after`."""

    __slots__ = ("_home", "after", "raw")

    def __init__(self, raw: torch.Tensor, after: torch.cuda.Event | None, home: deque[Returned]) -> None:
        self.raw, self.after, self._home = raw, after, home

    def __del__(self) -> None:
        self._home.append((self.raw, self.after))  # no lock: this may run wherever memory is collected

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self.raw[: numel * dtype.itemsize].view(dtype)


class HostBuffers:
    """The buffers of one model, in the room that its plan leaves."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._returned: deque[Returned] = deque()
        self._free: list[Returned] = []  # by size
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, pin: bool = False) -> Buffer:
        """A buffer of at least `num_bytes`; BudgetError, before anything is allocated, where there is no room."""
        size = -(-num_bytes // PAGE) * PAGE
        with self._lock:
            self._sort_returned()
            fit = self._find(size)
            if fit is None or fit[0].numel() > 2 * size:
                if self.room.spare_bytes() < size and fit is None:
                    self._free_unused()
                fit = self._allocate(size, pin=pin, instead=fit)
            else:
                self._free.remove(fit)
            return Buffer(*fit, self._returned)

    def trim(self) -> None:
        """Frees what is not in use."""
        with self._lock:
            self._sort_returned()
            self._free_unused()

    def _sort_returned(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=_size)

    def _find(self, size: int) -> Returned | None:
        index = bisect_left(self._free, size, key=_size)
        return self._free[index] if index < len(self._free) else None

    def _allocate(self, size: int, *, pin: bool, instead: Returned | None) -> Returned:
        if self.room.spare_bytes() >= size:
            raw = self.room.arena.allocate(torch.uint8, size, pin=pin)
            self.room.count(size)
            return raw, None
        if instead is None:
            raise self.room.shortage(size)
        self._free.remove(instead)
        return instead

    def _free_unused(self) -> None:
        for raw, after in self._free:
            if after is not None:
                after.synchronize()
            self.room.arena.release(raw)
            self.room.count(-raw.numel())
        self._free.clear()


def _size(entry: Returned) -> int:
    return entry[0].numel()
