"""Communication: a step moves as much as data parallel's all-reduce in stages 0 to 2, and half as much again in 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zero.counting import counted_traffic
from tests.zero.passes.test_control_flow import OrderByRank
from tests.zero.test_memory import DEPTH, NUMEL, WIDTH, Stack
from tests.zero.training import Batch, shard, train_ours
from unbounded.ranks.axis import Axis


def one_step(
    rank: int, world_size: int, plan: dict[str, Any], microbatches: int, no_sync: bool, has_torch_clip: bool = False
) -> dict[str, Any]:
    """The collectives of a steady step, the third."""
    torch.manual_seed(3)
    model = Stack()
    with counted_traffic() as traffic:
        model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), plan)
        for step in range(4):
            if step == 2:
                optimizer.wait()
                traffic.clear()
            for micro in range(microbatches):
                x = Batch(step, micro, rank).normal(2, WIDTH)
                if no_sync and micro < microbatches - 1:
                    with optimizer.no_sync():
                        model(x).square().mean().backward()
                else:
                    model(x).square().mean().backward()
            if has_torch_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return {"total": traffic.total / 2, "calls": dict(traffic.calls), "elements": dict(traffic.elements)}


@pytest.mark.parametrize(("stage", "volume"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_moves_the_volume_of_the_papers(ranks: Any, world_size: int, stage: int, volume: float) -> None:
    data_parallel = 2 * NUMEL  # an all-reduce of the gradients is a reduce-scatter and an all-gather
    for seen in ranks(world_size, one_step, {"stage": stage}, 1, False):
        assert seen["total"] == pytest.approx(volume * data_parallel, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "has_torch_clip"), [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)]
)
def test_collectives_are_counted_in_units_not_parameters(ranks: Any, stage: int, has_torch_clip: bool) -> None:
    """For each unit at most one gather per pass and one reduction per step, and a few more for the step itself."""
    for seen in ranks(2, one_step, {"stage": stage}, 1, False, has_torch_clip):
        per_step = sum(seen["calls"].values()) / 2
        assert per_step <= DEPTH * (3 if stage == 3 else 2) + 5 + 3  # a comparison before each phase


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_reduces_once_for_several_microbatches(ranks: Any, stage: int) -> None:
    gathers = 2 * 3 * NUMEL if stage == 3 else NUMEL
    for seen in ranks(2, one_step, {"stage": stage}, 3, True):
        assert seen["total"] == pytest.approx(gathers + NUMEL, rel=0.02)


@pytest.mark.every_second
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_order_of_collectives_is_the_same_on_every_rank(ranks: Any, precision: str, stage: int) -> None:
    orders = ranks(3, recorded_order, precision, stage)
    assert len(set(orders[0]["gather"])) > 1
    assert len(set(orders[0]["reduce"])) > 1
    assert orders[1:] == orders[:1] * 2


def recorded_order(rank: int, world_size: int, precision: str, stage: int) -> dict[str, list[str]]:
    """The units that were gathered and reduced, in order, when each rank runs its blocks in a different order."""
    order: dict[str, list[str]] = {"gather": [], "reduce": []}
    plain = {kind: getattr(Axis, kind) for kind in order}

    def record(kind: str) -> Any:
        def collective(ranks: Axis, target: Tensor, source: Tensor, name: str) -> None:
            order[kind].append(name)
            plain[kind](ranks, target, source, name)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for kind in order:
            patch.setattr(Axis, kind, record(kind))
        train_ours(rank, world_size, OrderByRank(), {"stage": stage, "precision": precision})
    return order
