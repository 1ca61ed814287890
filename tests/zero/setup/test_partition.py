"""Parameters of every size and kind are covered once and trained as plain PyTorch trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.training import Batch, Block, Task, TinyGPT, assert_parity, shard, train_both


class OddSizes(nn.Module):
    """Scalars, zero-size tensors, one element, primes, and one parameter larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.one = nn.Parameter(torch.randn(1, 1, 1))
        self.prime = nn.Parameter(torch.randn(13))
        self.huge = nn.Parameter(torch.randn(13, 1009) / 30)
        self.tail = nn.Parameter(torch.randn(1009, 3) / 30)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale + self.one.flatten()) * self.prime
        return (x @ self.huge).tanh() @ self.tail + self.empty.sum()


class Odd(Task):
    def model(self) -> nn.Module:
        return OddSizes()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(4, 13)).square().mean()


class Thousand(nn.Module):
    """A thousand parameters of one to three elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.ParameterList([nn.Parameter(torch.randn(1 + i % 3)) for i in range(1000)])

    def forward(self, weights: Tensor) -> Tensor:
        return torch.stack([p.square().sum() for p in self.tiny]) @ weights


class TinyMany(Task):
    steps = 2

    def model(self) -> nn.Module:
        return Thousand()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(1000)) / 100


class Frozen(Task):
    """Whole blocks and single parameters without gradient, inside and outside the optimizer."""

    def model(self) -> nn.Module:
        model = TinyGPT()
        model.blocks[1].requires_grad_(False)
        model.embedding.weight.requires_grad_(False)
        model.blocks[0].up.bias.requires_grad_(False)
        return model


class FrozenLeftOut(Frozen):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class AllFrozenButOne(Frozen):
    def model(self) -> nn.Module:
        model = TinyGPT()
        model.requires_grad_(False)
        model.blocks[0].norm.weight.requires_grad_(True)
        return model


class Tied(Task):
    """The head's weight is the embedding's, as in most language models."""

    def model(self) -> nn.Module:
        model = TinyGPT()
        model.head.weight = model.embedding.weight
        return model


class SharedAcrossBlocks(Task):
    """A matrix of the first block is also one of the last, and two blocks are one module under two names."""

    def model(self) -> nn.Module:
        model = TinyGPT(depth=4)
        model.blocks[3].up.weight = model.blocks[0].up.weight
        model.blocks[2] = model.blocks[1]
        return model


class EmptyGroup(Task):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
        return optimizer


class BigBlocks(Task):
    """Units whose size the number of ranks divides exactly: no padding."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(5, 16)).square().mean()


class Nested(Task):
    """Blocks inside blocks, in a Sequential and a ModuleDict, with parameters between."""

    def model(self) -> nn.Module:
        stages = nn.Sequential(*(nn.Sequential(Block(11), Block(11), nn.LayerNorm(11)) for _ in range(2)))
        return nn.Sequential(nn.Linear(11, 11), stages, nn.Linear(11, 2))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(5, 11)).square().mean()


TASKS = [
    Odd(),
    TinyMany(),
    Frozen(),
    FrozenLeftOut(),
    AllFrozenButOne(),
    Tied(),
    SharedAcrossBlocks(),
    EmptyGroup(),
    BigBlocks(),
    Nested(),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (2, 3), (4, 3)])
def test_parameters_of_every_kind_train_as_in_plain_pytorch(
    ranks: Any, task: Task, world_size: int, stage: int
) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


@pytest.mark.parametrize("task", [Odd(), SharedAcrossBlocks()], ids=lambda task: type(task).__name__)
def test_every_leaf_a_unit_trains_as_in_plain_pytorch(ranks: Any, task: Task) -> None:
    assert_parity(ranks(2, train_both, task, {"unit_numel": 1}))


def describe(rank: int, world_size: int, task: Task, stage: int) -> tuple[list[Any], list[Any], bool, bool]:
    """Names, shapes, dtypes and requires_grad before and after, and whether ties and values are kept."""
    model = task.model()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(n, tuple(p.shape), p.dtype, p.requires_grad, p.numel()) for n, p in model.named_parameters()]
    sharded, _ = shard(model, task.optimizer(model), {"stage": stage})
    after = [(n, tuple(p.shape), p.dtype, p.requires_grad, p.numel()) for n, p in sharded.named_parameters()]
    same = all(torch.equal(value, values[name]) for name, value in sharded.state_dict().items())
    return before, after, same, sharded is model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("task", [Odd(), Frozen(), Tied(), SharedAcrossBlocks()], ids=lambda task: type(task).__name__)
def test_names_shapes_and_values_are_unchanged_by_sharding(ranks: Any, task: Task, stage: int) -> None:
    for before, after, same_values, same_module in ranks(2, describe, task, stage):
        assert after == before
        assert same_values
        assert same_module


def buffers_after(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("low", torch.full((3,), 0.1, dtype=torch.float16))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("table", torch.arange(6, dtype=torch.float64) / 7, persistent=False)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"precision": "fp32"})
    model[:2](torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {name: (str(b.dtype), float(b.double().sum())) for name, b in model.named_buffers()}


def test_buffers_keep_their_dtype_and_value(ranks: Any) -> None:
    for buffers in ranks(2, buffers_after):
        assert buffers["low"] == ("torch.float16", pytest.approx(float(torch.full((3,), 0.1).half().double().sum())))
        assert buffers["count"] == ("torch.int64", 7)
        assert buffers["table"] == ("torch.float64", pytest.approx(15 / 7))
        assert buffers["1.num_batches_tracked"] == ("torch.int64", 1)
