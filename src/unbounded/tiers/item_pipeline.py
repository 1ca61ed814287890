"""Items pass through three stages, several of them in flight: what each needs is read, worked on, and written.

    read     | i2 | i3 | i4 |          started for items ahead of the one in work
    work          | i2 | i3 |          on the caller's thread, in order
    write              | i1 | i2 |     started by the work; its end is waited for later

`Stages` says what the three mean for one kind of item; `ItemPipeline` says when they happen. A pipeline whose items
need buffers of one pool leases them here. When all are out it continues with its oldest items, so it never waits for
itself.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from unbounded.tiers.pool import BufferPool, Lease

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Stages(Protocol[T_contra]):
    """What happens to an item. Each is called once and in this order; after a failure `abandon` takes the rest."""

    def read(self, item: T_contra) -> None:
        """Starts bringing in what the item needs."""

    def work(self, item: T_contra) -> None:
        """Waits for what was read, uses it, and starts writing the result."""

    def finish(self, item: T_contra) -> None:
        """Waits for what was written, and returns the item's buffers."""

    def abandon(self, item: T_contra) -> None:
        """Waits for whatever of the item is in flight and returns its buffers. What it raises is ignored."""


class ItemPipeline(Generic[T]):
    """Carries items through `stages`: at most `num_ahead` read ahead of the work, at most `num_unfinished` after it."""

    def __init__(
        self, stages: Stages[T], *, num_ahead: int, num_unfinished: int, pool: BufferPool | None = None
    ) -> None:
        self._stages, self._pool = stages, pool
        self._num_ahead, self._num_unfinished = max(1, num_ahead), num_unfinished
        self._ahead: deque[T] = deque()
        self._unfinished: deque[T] = deque()

    def run(self, items: Iterable[T]) -> None:
        """Returns when every item is finished. After a failure nothing is in flight, and the first one is raised."""
        source = iter(items)
        try:
            while self._read_ahead(source):
                self._work()
            while self._unfinished:
                self._finish()
        except BaseException:
            self._abandon_all()
            raise

    def lease(self) -> Lease:
        """A buffer of the pool for the item that is being read, one for each item. Called inside `read`."""
        assert self._pool is not None
        while (lease := self._pool.lease_if_free()) is None:
            if self._unfinished:
                self._finish()
            elif len(self._ahead) > 1:
                self._work()
            else:  # others have all of them, and this pipeline none
                return self._pool.lease()
        return lease

    def _read_ahead(self, source: Iterator[T]) -> bool:
        """Starts reading as far ahead as is allowed; returns whether there is an item to work on."""
        while len(self._ahead) < self._num_ahead:
            try:
                item = next(source)
            except StopIteration:
                break
            self._ahead.append(item)  # before anything can fail, so that its buffers are always returned
            self._stages.read(item)
        return bool(self._ahead)

    def _work(self) -> None:
        item = self._ahead.popleft()
        self._unfinished.append(item)
        self._stages.work(item)
        while len(self._unfinished) > self._num_unfinished:
            self._finish()

    def _finish(self) -> None:
        self._stages.finish(self._unfinished[0])
        self._unfinished.popleft()

    def _abandon_all(self) -> None:
        while self._unfinished or self._ahead:
            item = (self._unfinished or self._ahead).popleft()
            with contextlib.suppress(Exception):  # the first failure is the one that is raised
                self._stages.abandon(item)
