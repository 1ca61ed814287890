"""Clipping: the norm over all ranks and groups is torch's, and so is what it does to the gradients."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import Batch, Run, Task, assert_parity, shard, train_both, train_plain
from unbounded.native import kernels
from unbounded.zero.gradients import managed_grad, scale_factor
from unbounded.zero.gradients.gradient_array import GradientArray


class Clipped(Task):
    steps = 4

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)  # not invariant to the scale of gradients, as Adam is


class ClippedGroups(Clipped):
    """Frozen parameters count for nothing, and the groups count together."""

    def model(self) -> nn.Module:
        model = super().model()
        model.embedding.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.1}], lr=0.5)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize(
    "task",
    [Clipped(0.1), Clipped(1e6), ClippedGroups(0.1)],
    ids=["every step is clipped", "no step is clipped", "groups and frozen"],
)
def test_norm_and_clipped_update_equal_those_of_torch(ranks: Any, task: Task, stage: int, world_size: int) -> None:
    results = ranks(world_size, train_both, task, {"stage": stage})
    assert len(results[0][1].norms) == task.steps
    assert_parity(results)


def norms_around_a_step(rank: int, world_size: int) -> tuple[float, float, bool, set[tuple[str, int, str]]]:
    task = Clipped(1.0)
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {"gradients": "host", "host_threads": 3})
    noted: set[tuple[str, int, str]] = set()

    def noting(name: str) -> Any:
        kernel = getattr(kernels, name)

        def run(*tensors: torch.Tensor, pool: kernels.Pool | None = None) -> Any:
            noted.add((name, 0 if pool is None else pool.num_threads, threading.current_thread().name))
            return kernel(*tensors, pool=pool)

        return mock.patch.object(kernels, name, run)

    for step in range(2):  # the first teaches how many backwards a step has, and that somebody asks for the norm
        noted.clear()
        with noting("add"), noting("sum_squares"):
            task.loss(model, Batch(step, 0, rank)).backward()
            task.loss(model, Batch(step, 1, rank)).backward()
            norm = optimizer.clip_grad_norm_(float("inf"))
        again = optimizer.clip_grad_norm_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    return float(norm), float(again), isinstance(norm, torch.Tensor) and norm.ndim == 0, noted


def test_the_norm_is_a_scalar_tensor_and_the_same_when_asked_twice(ranks: Any) -> None:
    for norm, again, is_scalar, noted in ranks(2, norms_around_a_step):
        assert norm == again > 0
        assert is_scalar
        # The plan's threads add up and measure, both inside the backward.
        assert noted == {("add", 3, "unbounded-reduce"), ("sum_squares", 3, "unbounded-reduce")}


@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("accumulate_dtype", ["fp32", "bf16"])
def test_gradients_off_the_device_are_not_read_again_for_their_norm(
    tier: str, num_backwards: int, accumulate_dtype: str
) -> None:
    task = Clipped(1.0)
    model, found = task.model(), []
    plan = {"precision": "bf16", "gradients": tier, "accumulate_dtype": accumulate_dtype, "device_bytes": "1GiB"}
    model, optimizer = shard(model, task.optimizer(model), plan)
    units = [unit for unit in optimizer.engine.units if unit.trainable]
    for step in range(2):  # the first teaches that somebody asks for the norm
        for number in range(num_backwards):
            task.loss(model, Batch(step, number, 0)).backward()
        with mock.patch.object(GradientArray, "squares", autospec=True, side_effect=GradientArray.squares) as reading:
            norm = optimizer.clip_grad_norm_(float("inf"))
        found.append(reading.call_count)
        expected = sum(unit.gradient.store.squares(0, unit.gradient.store.numel) for unit in units)
        assert float(norm) == pytest.approx(expected**0.5, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    assert found == [0 if num_backwards > 1 else len(units), 0]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_was_measured_before_its_way_to_a_tier_is_not_measured_again(tier: str) -> None:
    """As on a GPU, where the stream that makes a gradient also measures it."""
    task = Task()
    model = task.model()
    plan = {"precision": "bf16", "gradients": tier, "device_bytes": "1GiB"}
    model, optimizer = shard(model, task.optimizer(model), plan)
    gradient = next(unit.gradient for unit in optimizer.engine.units if unit.trainable)
    parts = [torch.randn(gradient.store.numel).bfloat16() for _ in range(2)]
    assert gradient.measure_early(parts[0].float()) is None  # it is rounded on its way
    early = gradient.measure_early(parts[0])
    with mock.patch.object(kernels, "sum_squares", side_effect=AssertionError):
        gradient.add(parts[0], measure=True, squares=early)
        assert gradient.squares() == early == pytest.approx(parts[0].double().square().sum().item())
        assert gradient.measure_early(parts[1]) is None  # the sum is measured
        gradient.add(parts[1], measure=True, squares=early)
        total = (parts[0].float() + parts[1].float()).double().square().sum()
        assert gradient.squares() == pytest.approx(total.item())


def clip_twice(rank: int, world_size: int) -> float:
    task = Clipped(1.0)
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {})
    task.loss(model, Batch(0, 0, rank)).backward()
    optimizer.clip_grad_norm_(0.1)
    return float(optimizer.clip_grad_norm_(float("inf")))


def test_after_clipping_the_norm_is_the_maximum(ranks: Any) -> None:
    assert ranks(2, clip_twice) == pytest.approx([0.1, 0.1], rel=1e-4)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_odd_maxima_do_what_they_do_in_torch(max_norm: float) -> None:
    task, found = Task(), []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        model = task.model()
        optimizer: Any = task.optimizer(model)
        if is_sharded:
            model, optimizer = shard(model, optimizer, {})
        task.loss(model, Batch(0, 0, 0)).backward()
        if is_sharded:
            optimizer.clip_grad_norm_(max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def train_hinted(rank: int, world_size: int, max_norm: float | None, plan: dict[str, Any]) -> Any:
    task = Clipped(max_norm) if max_norm is not None else Task()
    torch.manual_seed(3)
    model = task.model()
    reference = train_plain(task, copy.deepcopy(model), rank=rank, world_size=world_size)
    model, optimizer = shard(model, task.optimizer(model), plan)
    ours = Run()
    for step in range(task.steps):
        loss = task.loss(model, Batch(step, 0, rank))
        with optimizer.last_backward(max_norm=max_norm):
            loss.backward()
        ours.losses.append(float(loss))
        if max_norm is not None:
            ours.norms.append(float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    ours.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return reference, ours


def train_hinted_stages(rank: int, world_size: int, stages: tuple[int, ...]) -> list[Any]:
    return [train_hinted(rank, world_size, norm, {"stage": stage}) for stage in stages for norm in (None, 0.1)]


@pytest.mark.parametrize(("world_size", "stages"), [(1, (3,)), (2, (0, 2, 3))])
def test_announcing_the_last_backward_changes_no_result(ranks: Any, world_size: int, stages: tuple[int, ...]) -> None:
    for results in zip(*ranks(world_size, train_hinted_stages, stages), strict=True):
        assert_parity(list(results))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_clipping_after_updates_that_were_announced_without_it_is_refused(tier: str) -> None:
    task = Task()
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {"gradients": tier})
    with optimizer.last_backward():
        task.loss(model, Batch(0, 0, 0)).backward()
    with pytest.raises(unbounded.StateError, match=r"last_backward\(max_norm=0.1\)"):
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_left_out_after_an_announced_backward_is_refused() -> None:
    task = Task()
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {})
    with optimizer.last_backward():
        task.loss(model, Batch(0, 0, 0)).backward()
    with pytest.raises(unbounded.StateError, match=r"zero_grad\(\) comes between a backward that has updated 6 units"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    task.loss(model, Batch(1, 0, 0)).backward()
    optimizer.zero_grad()


def test_a_factor_on_a_device_that_is_written_to_unseen_has_its_new_value_in_the_next_step() -> None:
    """Collectives, replayed graphs and `.data` count no version up. A value on a GPU is copied, not read: here too."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(6, 6)
    reference = copy.deepcopy(model)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    factor = torch.tensor(1.0)
    with mock.patch.object(managed_grad, "factor_of", scale_factor._device_value):
        for step in range(3):
            factor.data.fill_(1.0 / (step + 1))
            for one, stepped in ((reference, theirs), (model, optimizer)):
                one(torch.ones(2, 6)).square().sum().backward()
                for parameter in one.parameters():
                    parameter.grad.mul_(factor)
                stepped.step()
                stepped.zero_grad()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
