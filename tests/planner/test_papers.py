"""The papers' tables: what our arithmetic gives for them, and which figures it misses."""

from __future__ import annotations

import pytest

from unbounded.planner.papers import all_rows, infinity, megatron, zero_stages
from unbounded.planner.papers.table import Row


def figure(rows: list[Row], what: str) -> Row:
    return next(row for row in rows if row.what == what)


def test_every_figure_is_within_its_tolerance_but_those_known_to_miss() -> None:
    missed = {(row.table, row.what) for row in all_rows() if not row.hits}
    assert missed == {
        ("ZeRO-Infinity figure 2a: memory", "0.1T: working memory"),  # 1.25 times the paper's own formula
        ("ZeRO-Infinity figure 5b: weak scaling of 1T", "32 nodes over 4"),
    }


@pytest.mark.parametrize(("stage", "paper"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_takes_of_7_5b_on_64_ranks_what_its_table_says(stage: int, paper: float) -> None:
    row = figure(zero_stages.memory_rows(), f"7.5B, stage {stage}, 64 ranks")
    assert row.paper == paper
    assert row.ours == pytest.approx(paper, rel=0.01)


def test_a_trillion_parameters_take_18_3_tib_and_a_layer_of_them_9_77_gib() -> None:
    rows = infinity.memory_rows()
    assert figure(rows, "1T: states").ours == pytest.approx(12 * 128 * 25600**2 * 20 / 2**40)
    assert figure(rows, "1T: working memory").ours == pytest.approx(4 * 25600 * 4 * 25600 / 2**30)


def test_largest_models_grow_with_the_nodes_and_the_next_rung_says_what_it_lacks() -> None:
    rows = infinity.largest_rows()
    nodes = [row for row in rows if row.table.startswith("ZeRO-Infinity figure 1")]
    assert [row.ours for row in nodes] == [1, 8, 16, 32]
    assert all("lacks" in row.note for row in rows)


def test_a_gpu_does_more_on_more_nodes_because_each_updates_less() -> None:
    few, many, ratio = infinity.scaling_rows()
    assert many.ours > few.ours
    assert ratio.ours > 8


def test_bubbles_are_those_of_the_formula() -> None:
    rows = megatron.bubble_rows()
    assert len(rows) > 20
    for row in rows:
        assert row.ours == pytest.approx(row.paper, rel=1e-6), row.what
