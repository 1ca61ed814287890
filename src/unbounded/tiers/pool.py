"""A bounded pool of equal host buffers. If all are out, borrowing waits, which gives back-pressure."""

from __future__ import annotations

import threading

import torch

from unbounded.tiers.arena import HostArena


class Lease:
    """A borrowed buffer; `release` returns it, to be reused once the device has passed `after`."""

    def __init__(self, pool: BufferPool, raw: torch.Tensor) -> None:
        self._pool, self._raw = pool, raw

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._raw[: numel * dtype.itemsize].view(dtype)

    def release(self, after: torch.cuda.Event | None = None) -> None:
        pool, self._pool = self._pool, None  # type: ignore[assignment]
        if pool is not None:
            pool._give_back(self._raw, after)


class BufferPool:
    """`count` buffers of `buffer_bytes` each, allocated at the first lease."""

    def __init__(self, arena: HostArena, buffer_bytes: int, count: int) -> None:
        self.buffer_bytes, self.count = buffer_bytes, count
        self._arena = arena
        self._made = 0
        self._free: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._changed = threading.Condition()

    @property
    def is_pinned(self) -> bool:
        return self._arena.pin

    def lease(self) -> Lease:
        """A buffer, waiting until one is free."""
        with self._changed:
            while (found := self._take()) is None:
                self._changed.wait()
        return self._lend(*found)

    def lease_if_free(self) -> Lease | None:
        """A buffer, unless all are out."""
        with self._changed:
            found = self._take()
        return None if found is None else self._lend(*found)

    def _take(self) -> tuple[torch.Tensor, torch.cuda.Event | None] | None:
        if self._free:
            return self._free.pop(0)
        if self._made == self.count:
            return None
        raw = self._arena.allocate(torch.uint8, self.buffer_bytes)
        self._made += 1
        return raw, None

    def _lend(self, raw: torch.Tensor, after: torch.cuda.Event | None) -> Lease:
        if after is not None:
            after.synchronize()
        return Lease(self, raw)

    def _give_back(self, raw: torch.Tensor, after: torch.cuda.Event | None) -> None:
        with self._changed:
            self._free.append((raw, after))
            self._changed.notify()
