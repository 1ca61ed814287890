"""Linear programs of a few dozen rows: the two-phase simplex method on a dense tableau.

Bland's rule (the first improving column, the first of equal rows) takes over when the steepest column has made no
progress for a while, so that it always ends.
"""

from __future__ import annotations

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
    basis = list(range(size, size + num_upper))
    needs = [row for row in range(num_upper + num_equal) if row >= num_upper or negative[row]]
    basis += [0] * num_equal
    artificial = np.zeros((len(rows), len(needs)))
    for column, row in enumerate(needs):
        artificial[row, column] = 1.0
        basis[row] = size + num_upper + column
    table = np.hstack([rows, artificial, right[:, None]])
    width = size + num_upper
    first = np.concatenate([np.zeros(width), np.ones(len(needs))])
    if _run(table, basis, first) > 1e-7 * max(1.0, float(right.max(initial=0.0))):
        return None
    _expel(table, basis, width)
    table = np.hstack([table[:, :width], table[:, -1:]])
    value = _run(table, basis, np.concatenate([costs, np.zeros(num_upper)]))
    x = np.zeros(width)
    for row, column in enumerate(basis):
        if column < width:
            x[column] = table[row, -1]
    return value, x[:size]


def _run(table: np.ndarray, basis: list[int], costs: np.ndarray) -> float:
    """Pivots until no column improves; returns the value. Changes both in place."""
    value, waited = np.inf, 0
    while True:
        basic = np.array([costs[column] if column < len(costs) else 0.0 for column in basis])
        reduced = costs - basic @ table[:, :-1]
        now = float(basic @ table[:, -1])
        waited = 0 if now < value - 1e-12 * max(1.0, abs(value if np.isfinite(value) else 1.0)) else waited + 1
        value = min(value, now)
        scale = _TOLERANCE * max(1.0, float(np.abs(costs).max(initial=0.0)))
        improving = np.flatnonzero(reduced < -scale)
        if not len(improving):
            return now
        column = int(improving[0] if waited > _PATIENCE else improving[np.argmin(reduced[improving])])
        positive = np.flatnonzero(table[:, column] > _TOLERANCE)
        if not len(positive):
            return -np.inf
        ratios = table[positive, -1] / table[positive, column]
        tied = positive[ratios <= ratios.min() + 1e-12]
        row = int(min(tied, key=lambda r: basis[r]))
        _pivot(table, basis, row, column)


def _pivot(table: np.ndarray, basis: list[int], row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= np.outer(factors, table[row])
    basis[row] = column


def _expel(table: np.ndarray, basis: list[int], width: int) -> None:
    """Takes artificial variables, by now zero, out of the basis; a row with no other variable is redundant."""
    for row, column in enumerate(basis):
        if column >= width:
            usable = np.flatnonzero(np.abs(table[row, :width]) > 1e-7)
            if len(usable):
                _pivot(table, basis, row, int(usable[0]))
            else:
                table[row] = 0.0
