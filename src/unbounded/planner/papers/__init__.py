"""The tables of the papers that this library follows, each figure with what our arithmetic gives.

One set of constants for all rows of a machine (`presets`), none fitted to a row.
"""

from __future__ import annotations

from unbounded.planner.papers import infinity, megatron, zero_stages
from unbounded.planner.papers.table import Row


def all_rows() -> list[Row]:
    """Every figure, paper by paper."""
    return [
        *zero_stages.memory_rows(),
        *infinity.memory_rows(),
        *infinity.largest_rows(),
        *infinity.throughput_rows(),
        *infinity.scaling_rows(),
        *megatron.throughput_rows(),
        *megatron.bubble_rows(),
    ]
