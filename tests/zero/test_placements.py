"""Where states live changes no bit: every placement gives what the one that is all on the device gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.zero.training import Run, Task, assert_identical, train_ours

TIERS = ("device", "host", "disk")
ALL_ON_DEVICE = dict.fromkeys(("weights", "gradients", "optimizer"), "device")
PLACEMENTS = [
    dict(zip(ALL_ON_DEVICE, tiers, strict=True))
    for tiers in itertools.product(TIERS, TIERS, TIERS)
    if set(tiers) != {"device"}
]
MIXED = {
    "optimizer": (("blocks.0*", "device"), ("blocks.*", "disk"), ("*", "host")),
    "weights": (("blocks.1*", "disk"), ("*", "device")),
}


class Clipped(Task):
    """Two backwards per step, so that gradients are added up where they are kept."""

    steps = 2
    accumulate = 2
    max_norm = 0.1


FORMATS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, compact": {"precision": "bf16", "optimizer_format": "compact"},
    "fp16": {"precision": "fp16", "loss_scale": 1, "loss_scale_window": 0},
}


def train_placed(rank: int, world_size: int, state_format: str, placements: list[dict[str, Any]]) -> list[Run]:
    plan = {"stage": 3, **FORMATS[state_format]}
    return [train_ours(rank, world_size, Clipped(), {**plan, **placement}) for placement in placements]


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize(("world_size", "step"), [(1, 1), (2, 3), (4, 9)])
def test_every_placement_gives_the_same_bits(ranks: Any, world_size: int, step: int, state_format: str) -> None:
    """All 27 placements on one rank; on more ranks a third and a ninth of them, and a mixture by patterns."""
    placements = [ALL_ON_DEVICE, MIXED, *PLACEMENTS[::step]]
    for runs in ranks(world_size, train_placed, state_format, placements):
        for placement, run in zip(placements[1:], runs[1:], strict=True):
            try:
                assert_identical(runs[0], run)
            except AssertionError as error:
                raise AssertionError(f"{placement}: {error}") from error
