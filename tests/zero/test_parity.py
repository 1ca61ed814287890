"""Training sharded equals training plainly: every stage, world size, accumulation and kind of backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.zero.training import Batch, Run, Task, TinyGPT, assert_parity, train, train_both, train_sharded


def train_ddp_and_ours(rank: int, world_size: int, task: Task, plan: dict[str, Any]) -> tuple[Run, Run]:
    torch.manual_seed(3)
    model = task.model()
    replica = copy.deepcopy(model)
    wrapped = DistributedDataParallel(replica)
    wrapped.loss = lambda tokens: TinyGPT.loss(wrapped, tokens)  # type: ignore[assignment,arg-type]
    reference = train(task, wrapped, task.optimizer(replica), rank=rank, finish=lambda: None)
    reference.weights = dict(replica.state_dict())
    return reference, train_sharded(task, model, plan, rank=rank)


class Accumulating(Task):
    accumulate = 4


class VaryingCount(Task):
    steps = 4

    def num_microbatches(self, step: int) -> int:
        return 1 + step % 3


class SumLoss(Task):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.tokens()).square().sum() / 100


class NonScalar(Task):
    """backward() is called on the logits themselves, with a gradient from outside."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.tokens())

    def backward(self, loss: Tensor, batch: Batch) -> None:
        loss.backward(batch.normal(*loss.shape) / 10)


class TwoModels(Task):
    """Two networks in one loss, as in distillation or adversarial training, called one inside the other."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"one": TinyGPT(), "two": TinyGPT(depth=2)})

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        tokens = batch.tokens()
        return nn.functional.mse_loss(model["one"](tokens), model["two"](tokens))


class TwoBackwards(Task):
    """Two losses over one forward: the graph is kept for the second backward."""

    def backward(self, loss: Tensor, batch: Batch) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_stage_equals_plain_training(ranks: Any, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, Task(), {"stage": stage}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_stage_equals_distributed_data_parallel(ranks: Any, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_ddp_and_ours, Task(), {"stage": stage}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("task", [Accumulating(), VaryingCount()], ids=lambda task: type(task).__name__)
def test_gradients_accumulate_over_backwards(ranks: Any, task: Task, stage: int) -> None:
    assert_parity(ranks(2, train_both, task, {"stage": stage}))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "task", [SumLoss(), NonScalar(), TwoModels(), TwoBackwards()], ids=lambda task: type(task).__name__
)
def test_every_kind_of_backward_equals_plain_training(ranks: Any, task: Task, stage: int, world_size: int) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_unit_for_the_whole_model_equals_plain_training(ranks: Any, world_size: int) -> None:
    """The default size of units: so small a model is one."""
    assert_parity(ranks(world_size, train_both, Task(), {"unit_numel": None}))


def two_sharded(rank: int, world_size: int) -> tuple[Run, Run]:
    """A student and a frozen teacher, sharded each by itself with its own optimizer."""
    import unbounded

    torch.manual_seed(3)
    one, two = TinyGPT(), TinyGPT(depth=2)
    task = TwoModels()
    reference_model = nn.ModuleDict({"one": copy.deepcopy(one), "two": copy.deepcopy(two)})
    from tests.zero.training import train_plain

    reference = train_plain(task, reference_model, rank=rank, world_size=world_size)
    one, first = unbounded.shard(one, task.optimizer(one), {"stage": 3, "precision": "fp32"})
    two, second = unbounded.shard(two, task.optimizer(two), {"stage": 2, "precision": "fp32"})
    ours = Run()
    for step in range(task.steps):
        tokens = Batch(step, 0, rank).tokens()
        loss = nn.functional.mse_loss(one(tokens), two(tokens))
        loss.backward()
        ours.losses.append(float(loss))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    states = {f"one.{k}": v.clone() for k, v in one.state_dict().items()}
    ours.weights = states | {f"two.{k}": v.clone() for k, v in two.state_dict().items()}
    return reference, ours


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_models_sharded_apart_meet_in_one_loss(ranks: Any, world_size: int) -> None:
    assert_parity(ranks(world_size, two_sharded))
