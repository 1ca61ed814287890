"""A row of a paper and our figure for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY, THROUGHPUT, EXACT = 0.03, 0.15, 1e-3


@dataclass(frozen=True)
class Row:
    """One figure of a paper, ours, and how far apart they may be."""

    table: str
    what: str
    unit: str
    paper: float
    ours: float
    tolerance: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.ours / self.paper - 1

    @property
    def hits(self) -> bool:
        return abs(self.error) <= self.tolerance


def count_hits(rows: Iterable[Row]) -> tuple[int, int]:
    rows = list(rows)
    return sum(row.hits for row in rows), len(rows)
