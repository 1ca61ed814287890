"""A few cases of the random differential test, and some that it has found. `python -m tests.differential` runs more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.differential.cases import Case, Step, draw_case
from tests.differential.comparing import find_differences
from tests.differential.models import ModelSpec
from tests.differential.running import run_ours, run_plain

APART = ModelSpec(
    8, ("mlp", "partly", "mlp", "partly"), tied=False, looped=False, borrowed=False, frozen=(), skips="apart"
)
# Some parameters have a gradient on one rank alone. All steps but these are ordinary.
LOOKS = (
    Step(action="skip", zero="model"),
    Step(action="skip", zero="zeros", without_sync=True),
    Step(edit="halve", clip=("torch", 0.1)),
    Step(edit="drop", num_backwards=2, without_sync=True),
)


def looking_at_gradients(stage: int) -> Case:
    steps = [step for look in LOOKS for step in (look, Step(clip=("own", 100.0)))]
    return Case(
        5, 2, APART, {"stage": stage, "precision": "fp32", "gradients": "device", "optimizer": "device"}, "adamw", steps
    )


def run_all(rank: int, world_size: int, cases: list[Case], folder: str) -> list[Any]:
    return [run_ours(rank, world_size, case, f"{folder}/{index}") for index, case in enumerate(cases)]


def check(ranks: Any, world_size: int, cases: list[Case], folder: Path) -> None:
    for rank, results in enumerate(ranks(world_size, run_all, cases, str(folder))):
        for case, (kind, found) in zip(cases, results, strict=True):
            assert kind == "seen", (case, found)
            assert find_differences(case, run_plain(case), found, rank)[0] == [], case


def test_what_is_done_to_gradients_that_one_rank_alone_has_is_done_on_all(ranks: Any, tmp_path: Path) -> None:
    check(ranks, 2, [looking_at_gradients(stage) for stage in (0, 1, 3)], tmp_path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_loops_train_as_in_plain_pytorch(ranks: Any, tmp_path: Path, world_size: int) -> None:
    cases = [case for case in map(draw_case, range(20)) if case.world_size == world_size]
    check(ranks, world_size, cases[:4], tmp_path)
