"""Memory per rank is the papers' formula: what is partitioned is divided by the ranks, the rest is not."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests import process
from tests.zero.counting import live_bytes, settled_bytes
from tests.zero.training import Batch, shard
from unbounded.zero.reduction import reduction
from unbounded.zero.reduction.reduction import IN_FLIGHT, Reduction

WIDTH = 128
DEPTH = 16
NUMEL = DEPTH * WIDTH * WIDTH


class Stack(nn.Module):
    """Sixteen equal units of 16,384 parameters, no padding: the formula needs no correction."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def measure(rank: int, world_size: int, plan: dict[str, Any]) -> dict[str, float]:
    """Bytes per parameter: with gradients held, between steps, and at most inside a pass."""
    before = settled_bytes()
    model = Stack()
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), plan)
    peak = [0]

    def look(*_: Any) -> None:
        peak[0] = max(peak[0], live_bytes() - before)

    handles = [layer.register_forward_hook(look) for layer in model.layers]  # type: ignore[union-attr,operator]
    for step in range(3):
        loss = model(Batch(step, 0, rank).normal(2, WIDTH)).square().mean()
        loss.backward()
        del loss
        for unit in optimizer.engine.units:
            unit.gradient.order_stream()
        held = settled_bytes() - before if step else 0
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        rest = settled_bytes() - before
    for handle in handles:
        handle.remove()
    return {"held": held / NUMEL, "rest": rest / NUMEL, "peak": peak[0] / NUMEL}


def formula(stage: int, ranks: int, weight: float, gradient: float, states: float) -> tuple[float, float]:
    """Bytes per parameter with and without gradients: the ZeRO paper's table, for any sizes of the parts."""
    weight /= ranks if stage >= 3 else 1
    gradient /= ranks if stage >= 2 else 1
    states /= ranks if stage >= 1 else 1
    return weight + gradient + states, weight + states


SIZES = {"fp32": (4, 4, 8), "bf16": (2, 2, 10)}
"""weight, gradient, states. bf16 in the exact format: the 16 bits that complete a weight, and fp32 moments."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
def test_bytes_per_rank_are_the_formula(ranks: Any, world_size: int, stage: int, precision: str) -> None:
    held, rest = formula(stage, world_size, *SIZES[precision])
    unit = SIZES[precision][0] / DEPTH
    for seen in ranks(world_size, measure, {"stage": stage, "precision": precision, "prefetch_units": 1}):
        assert seen["held"] == pytest.approx(held, rel=0.03)
        assert seen["rest"] == pytest.approx(rest, rel=0.03)
        # In the forward: what is at rest, and of the gathered units the one in use, the next, and one on its way out
        # (stages 1 and 2: the parts that are being gathered).
        assert seen["peak"] <= 1.03 * rest + 3 * unit


def refuse(rank: int, world_size: int, stage: int, bytes_a_parameter: float) -> bool:
    model = Stack()
    on_device = dict.fromkeys(("weights", "gradients", "optimizer"), "device")
    plan = {"stage": stage, "precision": "bf16", "device_bytes": int(bytes_a_parameter * NUMEL), **on_device}
    try:
        shard(model, torch.optim.AdamW(model.parameters()), plan)
    except unbounded.BudgetError:
        return True
    return False


@pytest.mark.parametrize(("stage", "least"), [(1, 10), (2, 8)])
def test_a_budget_has_room_for_the_gradients_of_its_stage(ranks: Any, stage: int, least: int) -> None:
    """Two ranks: weights 2, states 10 / 2, gradients 2 / 2, and whole ones of 2 until stage 1 reduces them."""
    gathered = 1  # what a unit in flight takes
    assert all(ranks(2, refuse, stage, 0.98 * least))
    assert not any(ranks(2, refuse, stage, 1.02 * least + gathered))


def test_classic_formula_of_the_paper() -> None:
    """2 + 2 + 12/N, 2 + (2 + 12)/N and 16/N: the formula above, in classic terms, for 64 ranks."""
    assert [formula(stage, 64, 2, 2, 12)[0] for stage in (0, 1, 2, 3)] == [16, 4.1875, 2.21875, 0.25]


def frozen_bytes(rank: int, world_size: int) -> float:
    before = settled_bytes()
    model = Stack().requires_grad_(False)
    model.layers[0].requires_grad_(True)
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    for step in range(2):
        model(Batch(step, 0, rank).normal(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return (settled_bytes() - before) / NUMEL


def test_frozen_parameters_cost_no_optimizer_memory(ranks: Any) -> None:
    for seen in ranks(2, frozen_bytes):
        assert seen == pytest.approx((4 + 8 / DEPTH) / 2, rel=0.03)


def growth(rank: int, world_size: int) -> list[int]:
    model = Stack()
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    sizes = []
    for step in range(6):
        model(Batch(step, 0, rank).normal(2, WIDTH)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        sizes.append(settled_bytes())
    return sizes[2:]


def test_nothing_is_kept_from_step_to_step(ranks: Any) -> None:
    for sizes in ranks(2, growth):
        assert len(set(sizes)) == 1


def gradients_under_way(rank: int, world_size: int) -> int:
    """The most whole gradients alive at once when the reduce lane is far slower than the backward."""
    model = Stack()
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"stage": 3, "gradients": "host"})
    alive: list[weakref.ref[Tensor]] = []
    most, num_reduced = [0], [0]
    flatten, reduce = reduction._flatten, Reduction._reduce

    def counting_flatten(*arguments: Any) -> tuple[Tensor, bytes]:
        full, given = flatten(*arguments)
        alive.append(weakref.ref(full))
        most[0] = max(most[0], sum(held() is not None for held in alive))
        return full, given

    def slow_reduce(*arguments: Any) -> None:
        num_reduced[0] += 1
        process.eventually(lambda: len(alive) > min(num_reduced[0], DEPTH - 1))  # the backward has come to another
        time.sleep(0.02)
        reduce(*arguments)

    reduction._flatten, Reduction._reduce = counting_flatten, slow_reduce  # type: ignore[method-assign]
    try:
        model(Batch(0, 0, rank).normal(2, WIDTH)).square().mean().backward()
        optimizer.step()
    finally:
        reduction._flatten, Reduction._reduce = flatten, reduce  # type: ignore[method-assign]
    return most[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_slow_reduction_holds_the_backward_back_instead_of_piling_gradients_up(ranks: Any, world_size: int) -> None:
    for most in ranks(world_size, gradients_under_way):
        assert 2 <= most <= IN_FLIGHT + 2  # and the one that the lane works on, and the one that waits for it


class Normed(Stack):
    """The same with a norm in the root after the layers, as every language model has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def whole_gradients(rank: int, world_size: int, stage: int, zero_grad_first: bool) -> int:
    """The most units that wait with a whole gradient for their reduction, in any backward."""
    model = Normed()
    plan = {"stage": stage, "unit_numel": None}  # the norm is too small to be its own unit
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), plan)
    assert "root" in [unit.name for unit in optimizer.engine.units]
    most, complete = [0], Reduction.complete

    def counting_complete(*arguments: Any, **named: Any) -> None:
        complete(*arguments, **named)
        most[0] = max(most[0], sum(unit.gradient.local is not None for unit in optimizer.engine.units))

    Reduction.complete = counting_complete  # type: ignore[method-assign]
    try:
        for step in range(3):
            loss = model(Batch(step, 0, rank).normal(2, WIDTH)).square().mean()
            if zero_grad_first:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Reduction.complete = complete  # type: ignore[method-assign]
    return most[0]


@pytest.mark.parametrize("zero_grad_first", [False, True], ids=["", "zero_grad before the backward"])
@pytest.mark.parametrize("stage", [2, 3])
def test_no_unit_waits_with_its_whole_gradient_for_the_root(ranks: Any, stage: int, zero_grad_first: bool) -> None:
    assert ranks(2, whole_gradients, stage, zero_grad_first) == [0, 0]
