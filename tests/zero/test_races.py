"""Random delays in every lane, other ones on each rank, change no result: nothing depends on who comes first."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.zero.test_control_flow import Loop, Shuffled, SkippedApart
from tests.zero.training import Run, Task, assert_identical, train_ours


class Clipped(Task):
    max_norm = 0.1
    accumulate = 2


def train_delayed(rank: int, world_size: int, task: Task, plan: dict[str, Any]) -> tuple[Run, Run]:
    from unbounded.tiers import lane

    calm = train_ours(rank, world_size, task, plan)
    run, draw = lane._run, random.Random(rank)

    def delayed(*args: Any) -> None:
        time.sleep(draw.choice([0, 0, 0.001, 0.004]))
        run(*args)

    lane._run = delayed
    try:
        return calm, train_ours(rank, world_size, task, plan)
    finally:
        lane._run = run


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("task", [Clipped(), Loop(), Shuffled(), SkippedApart()], ids=lambda task: type(task).__name__)
def test_delays_in_the_lanes_change_no_bit(ranks: Any, task: Task, world_size: int, stage: int) -> None:
    for calm, delayed in ranks(world_size, train_delayed, task, {"stage": stage, "unit_numel": 1}):
        assert_identical(calm, delayed)


PLACED = {"weights": "host", "gradients": "host", "optimizer": "disk"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_delays_in_the_lanes_change_no_bit_of_an_offloaded_model(ranks: Any, world_size: int) -> None:
    for calm, delayed in ranks(world_size, train_delayed, Clipped(), {"stage": 3, **PLACED}):
        assert_identical(calm, delayed)
