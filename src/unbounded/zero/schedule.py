"""The order in which sites are visited, recorded in one pass and used as a prediction in the next.

A wrong prediction is a late fetch, never an error. With several ranks the order has a second use: the
collectives of a site must be joined by every rank, also by one whose own pass skipped it. Each rank therefore
walks the whole agreed order and is told which sites it passed over; visiting those as a *ghost* (gather and
release, or contribute zeros) makes its sequence of collectives the same as everyone's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class Schedule:
    """The expected order of one phase (forward or backward) and the place in it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected: tuple[int, ...] = tuple(expected)
        self._seen: list[int] = []
        self._cursor = 0
        self._active = False

    def begin(self) -> None:
        """A new pass starts."""
        self._seen, self._cursor, self._active = [], 0, True

    def visit(self, site: int) -> tuple[int, ...]:
        """Notes a visit; returns the sites that the expected order has between the last visit and this one."""
        if not self._active:
            return ()
        self._seen.append(site)
        try:
            found = self.expected.index(site, self._cursor)
        except ValueError:
            return ()
        skipped = self.expected[self._cursor : found]
        self._cursor = found + 1
        return skipped

    def upcoming(self, count: int) -> tuple[int, ...]:
        """The next sites that are expected."""
        return self.expected[self._cursor : self._cursor + count] if self._active else ()

    def end(self) -> tuple[int, ...]:
        """The pass is over; returns the sites that were still expected."""
        if not self._active:
            return ()
        remaining, self._cursor, self._active = self.expected[self._cursor :], len(self.expected), False
        return remaining

    @property
    def mark(self) -> int:
        """A number that is equal on two ranks whose last passes went the same way."""
        return zlib.crc32(repr(self._seen).encode())

    def adopt(self) -> None:
        """Takes the last pass as the expected order from now on."""
        if self._seen and not self._active:
            self.expected = tuple(self._seen)
