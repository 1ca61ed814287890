"""Random delays in every lane, different on each rank, change no result: nothing depends on who comes first."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from tests.zero.passes.test_control_flow import LastSkipped, Loop, Shuffled, SkippedApart
from tests.zero.training import Batch, Run, Task, assert_identical, shard, train_ours
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.step import updates
from unbounded.zero.unit import WeightState


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


class Clock:
    """Stands for the event that fetches wait on, and for the stream that it is recorded on."""

    def __init__(self) -> None:
        self.now = self.recorded = self.waited = 0

    def record(self) -> None:
        self.now = self.recorded = self.now + 1

    def wait_event(self, event: Clock) -> None:
        self.waited = event.recorded


def gather_after_updates(rank: int, world_size: int, stage: int) -> tuple[int, list[str]]:
    """Updates run on the stream, as for states on a GPU. Which updates a gather of their unit does not wait for, or
    do not wait for it."""
    torch.manual_seed(3)
    task = LastSkipped()  # what one rank does not come to is still being gathered in the step
    model = task.model()
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": stage})
    clock, updated, early, num_gathered = Clock(), {}, [], 0
    run_now, fetch = updates.Updates._run_now, Gathering._fetch

    def run_at(self: Any, unit: Any, *arguments: Any) -> None:
        if unit.state is WeightState.FETCHING:
            early.append(unit.name)
        clock.now = updated[unit.name] = clock.now + 1
        run_now(self, unit, *arguments)

    def fetch_at(self: Any, unit: Any, *arguments: Any) -> None:
        nonlocal num_gathered
        fetch(self, unit, *arguments)
        num_gathered += 1
        if clock.waited < updated.get(unit.name, 0):
            early.append(unit.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updates, "_run_now", run_at)
        patch.setattr(updates, "kernel_device", lambda unit: torch.device("cuda"))
        patch.setattr(Gathering, "_fetch", fetch_at)
        patch.setattr(torch.cuda, "current_stream", lambda: clock)
        patch.setattr(optimizer.engine.gathering, "_released", clock)
        for step in range(3):
            task.loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return num_gathered, early


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_gather_runs_beside_an_update_on_the_gpu(ranks: Any, stage: int) -> None:
    for num_gathered, early in ranks(2, gather_after_updates, stage):
        assert num_gathered > 0
        assert not early
