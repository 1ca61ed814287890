"""Linear programs of a few dozen rows: the two-phase simplex method on a dense tableau.

Bland's rule (the first improving column, the first of equal rows) takes over when the steepest column has made no
progress for a while, so that it always ends.
"""

from __future__ import annotations

import math

import numpy as np

_TOLERANCE = 1e-9
_PATIENCE = 40


def minimize(
    costs: np.ndarray, upper: np.ndarray, bounds: np.ndarray, equal: np.ndarray, totals: np.ndarray
) -> tuple[float, np.ndarray] | None:
    """The least `costs @ x` with `upper @ x <= bounds`, `equal @ x == totals` and x >= 0; None if there is none."""
    num_upper, num_equal, size = len(upper), len(equal), len(costs)
    rows = np.zeros((num_upper + num_equal, size + num_upper))
    rows[:num_upper, :size], rows[num_upper:, :size] = upper, equal
    rows[:num_upper, size:] = np.eye(num_upper)
    right = np.concatenate([bounds, totals]).astype(float)
    negative = right < 0
    rows[negative] *= -1
    right[negative] *= -1
    basis = np.arange(size, size + num_upper + num_equal)
    needs = np.flatnonzero(negative | (np.arange(len(rows)) >= num_upper))
    artificial = np.zeros((len(rows), len(needs)))
    artificial[needs, np.arange(len(needs))] = 1.0
    basis[needs] = size + num_upper + np.arange(len(needs))
    table = np.hstack([rows, artificial, right[:, None]])
    width = size + num_upper
    first = np.concatenate([np.zeros(width), np.ones(len(needs))])
    if _run(table, basis, first) > 1e-7 * max(1.0, float(right.max(initial=0.0))):
        return None
    _expel(table, basis, width)
    table = np.hstack([table[:, :width], table[:, -1:]])
    value = _run(table, basis, np.concatenate([costs, np.zeros(num_upper)]))
    x = np.zeros(width)
    own = basis < width
    x[basis[own]] = table[own, -1]
    return value, x[:size]


def _run(table: np.ndarray, basis: np.ndarray, costs: np.ndarray) -> float:
    """Pivots until no column improves; returns the value. Changes both in place."""
    least = -_TOLERANCE * max(1.0, float(np.abs(costs).max(initial=0.0)))
    costs_of = np.append(costs, np.zeros(len(basis)))  # a redundant row keeps its artificial variable, which is free
    value, waited = np.inf, 0
    while True:
        priced = costs_of[basis] @ table
        reduced, now = costs - priced[:-1], float(priced[-1])
        waited = 0 if now < value - 1e-12 * max(1.0, abs(value if math.isfinite(value) else 1.0)) else waited + 1
        value = min(value, now)
        column = int((reduced < least).argmax() if waited > _PATIENCE else reduced.argmin())
        if not reduced[column] < least:
            return now
        positive = (table[:, column] > _TOLERANCE).nonzero()[0]
        if not len(positive):
            return -np.inf
        ratios = table[positive, -1] / table[positive, column]
        tied = positive[ratios <= ratios.min() + 1e-12]
        _pivot(table, basis, int(tied[basis[tied].argmin()]), column)


def _pivot(table: np.ndarray, basis: np.ndarray, row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= factors[:, None] * table[row]
    basis[row] = column


def _expel(table: np.ndarray, basis: np.ndarray, width: int) -> None:
    """Takes artificial variables, by now zero, out of the basis; a row with no other variable is redundant."""
    for row in map(int, np.flatnonzero(basis >= width)):
        usable = np.flatnonzero(np.abs(table[row, :width]) > 1e-7)
        if len(usable):
            _pivot(table, basis, row, int(usable[0]))
        else:
            table[row] = 0.0
