"""Mixed precision: bf16 and fp16 with full-precision masters against the recipe written out, and loss scaling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import Batch, Run, Task, TinyGPT, assert_parity, average_gradients, shard, train_both

SCALE = 1024.0  # of the loss in fp16, whose small gradients would underflow
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Mixed(Task):
    steps = 8

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def train_recipe(task: Task, model: nn.Module, dtype: torch.dtype, rank: int, world_size: int) -> Run:
    """The classic recipe: fp32 masters, forward and backward in `dtype`, the optimizer on the masters."""
    masters = model
    model = copy.deepcopy(masters).to(dtype)
    optimizer, run, scale = task.optimizer(masters), Run(), SCALE if dtype is torch.float16 else 1.0
    for step in range(task.steps):
        loss = task.loss(model, Batch(step, 0, rank))
        (loss * scale).backward()
        run.losses.append(float(loss.detach()))
        average_gradients(model, world_size)
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float() / scale
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return run


def mixed(rank: int, world_size: int, precision: str, plan: dict[str, Any]) -> tuple[Run, Run, list[str]]:
    task = Mixed()
    torch.manual_seed(3)
    model = task.model()
    reference = train_recipe(task, copy.deepcopy(model), DTYPES[precision], rank, world_size)
    model, optimizer = shard(model, task.optimizer(model), {"precision": precision, **plan})
    if precision == "fp16":
        optimizer.loss_scale = type(optimizer.loss_scale)(value=SCALE)
    ours, dtypes = Run(), set()
    for step in range(task.steps):
        logits = model(Batch(step, 0, rank).tokens()[:, :-1])
        dtypes.add(str(logits.dtype))
        loss = task.loss(model, Batch(step, 0, rank))
        optimizer.scale(loss).backward()
        ours.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return reference, ours, sorted(dtypes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
def test_low_precision_with_masters_follows_the_recipe(ranks: Any, precision: str, world_size: int, stage: int) -> None:
    """Masters agree to fp32 rounding; now and then one of them rounds to the other neighbour in the low precision."""
    tolerance = 2e-3 if precision == "bf16" else 1e-3
    for reference, ours, dtypes in ranks(world_size, mixed, precision, {"stage": stage}):
        assert dtypes == [str(DTYPES[precision])]
        assert ours.losses == pytest.approx(reference.losses, rel=tolerance if world_size == 1 else 5 * tolerance)
        assert ours.losses[-1] < ours.losses[0] + 0.5


def small_steps(rank: int, world_size: int) -> tuple[float, float]:
    """Updates far below the spacing of bf16: only the master can add them up."""
    model = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=1e-4), {"precision": "bf16", "stage": 3})
    for _ in range(200):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.state_dict()["weight"]
    return float(weight.float().mean()), float(weight.float().std())


def test_updates_below_the_spacing_of_bf16_are_not_lost(ranks: Any) -> None:
    for mean, deviation in ranks(2, small_steps):
        assert mean == pytest.approx(1.0 - 200 * 1e-4, abs=2e-3)
        assert deviation == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_stage_gives_the_same_bits_in_low_precision(ranks: Any, precision: str) -> None:
    for rank_results in zip(*(ranks(2, mixed, precision, {"stage": s}) for s in (0, 1, 2, 3)), strict=True):
        losses = [ours.losses for _, ours, _ in rank_results]
        assert losses[1:] == losses[:1] * 3


class LowWithFullNorms(Task):
    """bf16 with norms in fp32, and no precision in the plan: every parameter trains in its own dtype."""

    def model(self) -> nn.Module:
        model = TinyGPT().to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
                module.forward = _forward_in_float.__get__(module)  # type: ignore[method-assign]
        return model


def _forward_in_float(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias).to(x.dtype)


def own_dtypes(rank: int, world_size: int) -> tuple[list[str], list[str], list[float]]:
    torch.manual_seed(3)
    task = LowWithFullNorms()
    model = task.model()
    before = [str(p.dtype) for p in model.parameters()]
    model, optimizer = unbounded.shard(model, task.optimizer(model), {"stage": 3})
    losses = []
    for _ in range(12):
        loss = task.loss(model, Batch(0, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return before, [str(value.dtype) for value in model.state_dict().values()], losses


def test_a_model_of_mixed_dtypes_keeps_them_and_learns(ranks: Any) -> None:
    for before, after, losses in ranks(2, own_dtypes):
        assert set(before) == {"torch.bfloat16", "torch.float32"}
        assert after == before
        assert losses[-1] < 0.8 * losses[0]


def trace_scale(rank: int, world_size: int, poisoned: dict[int, int], clip: bool) -> list[tuple[float, bool, int]]:
    """The scale after every step, whether the weights moved, and steps skipped; `poisoned` maps a step to a rank."""
    torch.manual_seed(3)
    model = TinyGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = shard(model, optimizer, {"precision": "fp16", "stage": 3})
    optimizer.loss_scale = type(optimizer.loss_scale)(value=2.0**10, growth_interval=3)
    trace = []
    before = _flat(model)
    for step in range(9):
        loss = model.loss(Batch(step, 0, rank).tokens())
        if poisoned.get(step) == rank:
            loss = loss * float("inf")
        optimizer.scale(loss).backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = _flat(model)
        trace.append((optimizer.loss_scale.value, not torch.equal(before, after), optimizer.skipped_steps))
        assert after.isfinite().all()
        before = after
    return trace


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.float().flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clip", [False, True], ids=["not clipped", "clipped"])
def test_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    ranks: Any, world_size: int, clip: bool
) -> None:
    poisoned = {1: world_size - 1, 2: 0}
    expected = [
        (1024.0, True, 0),
        (512.0, False, 1),
        (256.0, False, 2),
        (256.0, True, 2),
        (256.0, True, 2),
        (512.0, True, 2),  # three good steps: doubled
        (512.0, True, 2),
        (512.0, True, 2),
        (1024.0, True, 2),
    ]
    for trace in ranks(world_size, trace_scale, poisoned, clip):
        assert trace == expected


def train_scaled(rank: int, world_size: int, zero_grad_first: bool) -> list[float]:
    torch.manual_seed(3)
    model = TinyGPT()
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"precision": "fp16"})
    losses = []
    for step in range(4):
        loss = optimizer.scale(model.loss(Batch(step, 0, rank).tokens()))
        losses.append(float(loss) / optimizer.loss_scale.value)
        if zero_grad_first:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_gradients_cleared_after_the_forward_are_unscaled_all_the_same(ranks: Any) -> None:
    assert ranks(2, train_scaled, True) == ranks(2, train_scaled, False)


def test_the_scale_has_a_minimum_and_a_maximum() -> None:
    from unbounded.zero.step.loss_scale import LossScale

    scale = LossScale(value=4.0)
    seen = []
    for _ in range(4):
        scale = scale.after_step(overflow=True)
        seen.append(scale.value)
    assert seen == [2.0, 1.0, 1.0, 1.0]
    top = LossScale(value=2.0**23, growth_interval=1)
    assert [top.value, (top := top.after_step(overflow=False)).value, top.after_step(overflow=False).value] == [
        2.0**23,
        2.0**24,
        2.0**24,
    ]


class WithDouble(Task):
    """A norm in double precision, for whatever reason: it keeps its dtype."""

    def model(self) -> nn.Module:
        model = TinyGPT()
        model.norm = Widened(11)
        return model


class Widened(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=torch.float64)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.double()).to(input.dtype)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_two_dtypes_train_in_their_own(ranks: Any, world_size: int) -> None:
    assert_parity(ranks(world_size, train_both, WithDouble(), {"precision": None}))


class Double(Task):
    accumulate = 2
    max_norm = 0.1

    def model(self) -> nn.Module:
        return TinyGPT().double()


@pytest.mark.parametrize("gradients", ["device", "host", "disk"])
def test_double_precision_adds_up_and_clips_on_every_tier(ranks: Any, gradients: str) -> None:
    plan = {"precision": None, "gradients": gradients}
    assert_parity(ranks(2, train_both, Double(), plan))
