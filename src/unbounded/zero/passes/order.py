"""The order in which sites are visited, recorded in one pass and expected of the next.

For one rank the order is a prediction: a wrong one is a late fetch, never an error. For several it is also an
agreement. Whatever a rank's own pass does, it gathers the sites of the expected order once each and in that
order, running ahead of its visits by the prefetch; so ranks that skip different sites, or take them in another
order, still issue the same sequence of collectives. `issue` gives the next stretch of that order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Set

# After so many passes without a site, the agreed order leaves it out.
IDLE_PASSES = 100


class Order:
    """The expected order of one phase (forward or backward) and the place in it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected: tuple[int, ...] = tuple(expected)
        self._first = self.expected
        self._idle: dict[int, int] = {}
        self.active = False
        self._seen: list[int] = []
        self._visited = 0  # positions before this one were visited or skipped
        self._issued = 0  # positions before this one have been issued

    def begin(self) -> None:
        """A new pass starts."""
        self._seen, self._visited, self._issued, self.active = [], 0, 0, True

    def visit(self, site: int) -> tuple[int, ...] | None:
        """Notes a visit; returns the sites that were expected before it, or None if no such visit is expected."""
        if not self.active:
            return None
        self._seen.append(site)
        try:
            found = self.expected.index(site, self._visited)
        except ValueError:
            return None
        passed = self.expected[self._visited : found]
        self._visited = found + 1
        return passed

    @property
    def num_ahead(self) -> int:
        """How many sites beyond the last visit have been issued."""
        return max(0, self._issued - self._visited)

    def skip(self) -> None:
        """Drops what was skipped and not issued: with one rank, no other rank needs it."""
        self._issued = max(self._issued, self._visited - 1)

    def issue(self, ahead: int) -> tuple[int, ...]:
        """The sites to gather now, so that the order is issued up to `ahead` beyond the last visit."""
        stop = min(len(self.expected), self._visited + ahead)
        stretch = self.expected[self._issued : stop]
        self._issued = max(self._issued, stop)
        return stretch

    def next_of(self, sites: Set[int]) -> int | None:
        """The first of `sites` that has not been issued, if there is one."""
        rest = map(self.expected.__getitem__, range(self._issued, len(self.expected)))
        return next((site for site in rest if site in sites), None)

    def end(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pass is over; returns what was issued for visits that did not come, and what was not issued."""
        if not self.active:
            return (), ()
        self.active = False
        return self.expected[self._visited : self._issued], self.expected[self._issued :]

    @property
    def mark(self) -> int:
        """A number that is equal on two ranks whose last passes went the same way."""
        return zlib.crc32(repr(self._seen).encode())

    def adopt(self, *, keep_all: bool) -> None:
        """Takes the last pass as the expected order from now on.

        With `keep_all`, sites that it left out stay at their place in the first order: a randomly skipped block may
        come back on only one rank, and its peers must join it. A site that was idle for long is dropped anyway.
        """
        if self.active or not self._seen:
            return
        order = list(self._seen)
        for before, site in enumerate(self._first, start=-1):
            self._idle[site] = 0 if site in self._seen else self._idle.get(site, 0) + 1
            if keep_all and 0 < self._idle[site] < IDLE_PASSES:
                above = (
                    next((other for other in self._first[before::-1] if other in order), None) if before >= 0 else None
                )
                order.insert(0 if above is None else len(order) - order[::-1].index(above), site)
        self.expected = tuple(order)
