"""Results do not depend on how the work is cut: stages, unit sizes and prefetch give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.zero.training import Run, Task, assert_identical, train_ours

VARIANTS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "unit_numel": 1},  # every leaf module is its own unit
    {"stage": 2, "unit_numel": 1},
    {"stage": 1, "unit_numel": None},  # the default: the whole model is one small unit
    {"stage": 3, "unit_numel": None},
    {"stage": 3, "unit_numel": 300},  # only the larger matrices are
    {"stage": 3, "prefetch_units": 0},
    {"stage": 3, "prefetch_units": 1},
    {"stage": 3, "prefetch_units": 100},
]


class Clipped(Task):
    max_norm = 0.1  # below the norm of every step, so every step is scaled


class Accumulating(Task):
    steps = 2
    accumulate = 3


def train_variants(rank: int, world_size: int, task: Task, plans: list[dict[str, Any]]) -> list[Run]:
    return [train_ours(rank, world_size, task, plan) for plan in plans]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("task", [Task(), Clipped()], ids=lambda task: type(task).__name__)
def test_stage_unit_size_and_prefetch_do_not_change_a_bit(ranks: Any, world_size: int, task: Task) -> None:
    for runs in ranks(world_size, train_variants, task, VARIANTS):
        for plan, run in zip(VARIANTS[1:], runs[1:], strict=True):
            try:
                assert_identical(runs[0], run)
            except AssertionError as error:
                raise AssertionError(f"{plan} differs from {VARIANTS[0]}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_that_reduce_at_other_times_agree_when_accumulating(ranks: Any, world_size: int) -> None:
    """Stages 0 and 1 may add up microbatches before or after the ranks, which differs by one rounding."""
    for runs in ranks(world_size, train_variants, Accumulating(), VARIANTS):
        for run in runs[1:]:
            torch.testing.assert_close(run.losses, runs[0].losses, rtol=1e-6, atol=1e-6)
            for name, value in run.weights.items():
                torch.testing.assert_close(value, runs[0].weights[name], rtol=1e-6, atol=1e-6)


def test_two_runs_are_identical(ranks: Any) -> None:
    for one, other in ranks(4, train_variants, Task(), [{"stage": 3}, {"stage": 3}]):
        assert_identical(one, other)
