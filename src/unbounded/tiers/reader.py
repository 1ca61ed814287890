"""Somebody who still reads a unit's states in the background, and must make way before they are overwritten."""

from __future__ import annotations

from collections.abc import Callable

from unbounded.native.kernels import Pool
from unbounded.tiers.lane import Handle

MakeWay = Callable[["Reader", "Pool | None"], None]


class Reader(Handle):
    """Complete when the states may be overwritten. `make_way` is called when somebody waits for that.

    Whoever finds out only afterwards that he has written says so by `spoil`: what was read is of no use.
    """

    def __init__(self, make_way: MakeWay | None = None) -> None:
        super().__init__()
        self._make_way = make_way
        self.spoiled = ""  # who has written without waiting, in words

    def make_way(self, pool: Pool | None = None) -> None:
        """Returns when the states may be overwritten; `pool` may be used to copy them out of the way."""
        if self._make_way is not None and not self.launched():
            self._make_way(self, pool)
        self.wait()

    def spoil(self, what: str) -> None:
        """The states may have been overwritten while they were read, by `what`."""
        if not self.launched():
            self.spoiled = what
