"""Architectures of `transformers` train sharded as they train in plain PyTorch, with nothing asked of the user.

Five steps of AdamW in fp32, stage 3. Sharding changes no operation of the forward or backward, and the mean over
two ranks is exact but for one rounding of the sum; what may differ is the order in which autograd adds the
gradients of a weight that is used twice, and the rounding of the optimizer's fused update. Both are a few units in
the last place (6e-8) per step; Adam can enlarge them where a gradient is itself no more than rounding (the bias of an
attention's keys), which `eps` = 1e-6 keeps small. After five steps losses must agree to 1e-5, relative, and weights to
1e-3, while the steps move them by 1e-2: for those biases the rounding is all there is.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import relative_error, small_units
from tests.zoo.architectures import ARCHITECTURES, BUFFERED, Architecture, batch
from tests.zoo.over_axes import compare_over

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
STEPS = 5


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)


def train_plain(architecture: Architecture, model: nn.Module, world_size: int) -> list[list[float]]:
    """Losses by step and rank of the whole model on the batches of all ranks, gradients averaged."""
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        row = []
        for rank in range(world_size):
            loss = model(**batch(architecture, step, rank)).loss
            (loss / world_size).backward()
            row.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(row)
    return losses


def train_sharded(architecture: Architecture, model: nn.Module, rank: int, plan: dict[str, Any]) -> list[float]:
    with small_units(100):
        model, optimizer = unbounded.shard(model, optimizer_of(model), {"stage": 3, "precision": "fp32", **plan})
    losses = []
    for step in range(STEPS):
        loss = model(**batch(architecture, step, rank)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(rank: int, world_size: int, name: str, **plan: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    plain = copy.deepcopy(model)
    expected = train_plain(architecture, plain, world_size)
    losses = train_sharded(architecture, model, rank, plan)
    wanted, found = plain.state_dict(), model.state_dict()
    errors = {
        key: relative_error(found[key], value)
        for key, value in wanted.items()
        if value.is_floating_point() and "running_" not in key  # running statistics are each rank's own
    }
    return {
        "expected": [row[rank] for row in expected],
        "losses": losses,
        "keys": list(wanted) == list(found),
        "worst": max(errors.items(), key=lambda item: item[1]),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_in_plain_pytorch(ranks: Any, name: str, world_size: int) -> None:
    check(ranks(world_size, compare, name))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_state_that_is_updated_in_place_trains_off_the_device(ranks: Any, tier: str) -> None:
    check(ranks(1, functools.partial(compare, weights=tier, gradients=tier, optimizer=tier), "rwkv"))


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in ("bart", "distilbert", "gptj", "stablelm", "whisper", "vit")), ("llama", "aot_eager")],
)
def test_an_architecture_is_cut_by_the_plan_that_comes_with_the_library(ranks: Any, name: str, compiled: Any) -> None:
    plan = {"tensor": 2, "sequence": name != "vit", "compile": compiled}  # ViT has an odd number of tokens
    losses, weights = ranks(2, compare_over, name, plan)[0]
    assert losses < 1e-5
    assert weights < 1e-4


def in_16_bits(rank: int, world_size: int, name: str, plan: dict[str, Any]) -> list[float]:
    """The losses of a model in bf16, and first that of the plain one cast to it."""
    torch.manual_seed(5)
    architecture = BUFFERED[name]
    model = architecture.build()
    cast = copy.deepcopy(model).to(torch.bfloat16)
    inputs = batch(architecture, 0, 0)
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    losses = [cast(**inputs).loss.item()]
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"precision": "bf16", **plan})
    for step in range(3):
        loss = model(**batch(architecture, step, 0)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [(1, {}), (2, {"stage": 3, "weights": "disk", "gradients": "disk", "optimizer": "disk"})],
    ids=["device", "disk of two ranks"],
)
@pytest.mark.parametrize("name", BUFFERED)
def test_statistics_and_other_float_buffers_go_with_16_bits(
    ranks: Any, name: str, world_size: int, plan: dict[str, Any]
) -> None:
    for expected, first, *rest in ranks(world_size, in_16_bits, name, plan):
        assert first == pytest.approx(expected, rel=0.01)
        assert all(0.0 < loss < 10.0 for loss in rest)


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["losses"]) == STEPS
        assert len(set(result["expected"])) == STEPS, "the reference does not learn"
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-5)
        assert result["keys"]
        assert result["worst"][1] < 1e-3, result["worst"]
