"""Modules that return anything, and parameters that are used or returned where their own module does not run."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.training import Batch, Block, Task, assert_parity, shard, train_both

Pair = namedtuple("Pair", ["hidden", "extra"])


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Holder:
    """An object that torch does not know, with slots and no way to make it again."""

    __slots__ = ("hidden", "note")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.note = "kept"


class Returning(Block):
    """A block that returns its output in a container of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(11)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {
            "dict": lambda: {"hidden": y, "extra": {"deep": [y * 2, "text", None]}},
            "tuple": lambda: (None, (y, [y + 1]), 3),
            "namedtuple": lambda: Pair(y, (1, 2)),
            "dataclass": lambda: Output(y, {"nested": Output(y)}),
            "object": lambda: Holder(y),
            "list": lambda: [y],
        }[self.kind]()


def take(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["hidden"] + output["extra"]["deep"][0]
    if isinstance(output, Pair | Output | Holder):
        return output.hidden
    return output[1][0] + output[1][1][0] if isinstance(output, tuple) else output[0]


class Containers(Task):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.ModuleList([Returning(self.kind), Returning(self.kind), Returning(self.kind)])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x = batch.normal(4, 11)
        for block in model:  # type: ignore[union-attr]
            x = take(block(x))
        return x.square().mean()


class Whole(nn.Module):
    """The same containers inside a root that returns one itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Returning(kind), Returning(kind)])
        self.last = Returning(kind)

    def forward(self, *, x: Tensor) -> Any:
        for block in self.blocks:
            x = take(block(x))
        return self.last(x)


class WholeTask(Containers):
    def model(self) -> nn.Module:
        return Whole(self.kind)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return take(model(x=batch.normal(4, 11))).square().mean()


class UsedOutside(nn.Module):
    """The head uses the embedding's weight, and the loss a block's, without calling the modules that own them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 11)
        self.blocks = nn.ModuleList(Block(11) for _ in range(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(11)) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.embedding.weight)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        x = nn.functional.linear(x, self.blocks[0].up.weight)
        return nn.functional.linear(x @ self.blocks[2].down.weight.t(), self.embedding.weight)


class Outside(Task):
    def model(self) -> nn.Module:
        return UsedOutside()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.tokens()).square().mean()


class Regularised(Task):
    """The loss itself reads parameters, outside every forward, as weight penalties do."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        return super().loss(model, batch) + 0.01 * penalty


class HandsOut(nn.Module):
    """A module that returns its parameter, raw; the root uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 11) / 4)

    def forward(self) -> Tensor:
        return self.weight


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hands = nn.ModuleList([HandsOut(), HandsOut()])
        self.linear = nn.Linear(11, 11)

    def forward(self, x: Tensor) -> Tensor:
        for hand in self.hands:
            x = (x @ hand()).tanh()
        return self.linear(x)


class ParameterReturned(Task):
    def model(self) -> nn.Module:
        return Returned()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(4, 11)).square().mean()


KINDS = ["dict", "tuple", "namedtuple", "dataclass", "object", "list"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", [Containers, WholeTask])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3)])
def test_modules_may_return_any_container(ranks: Any, task: Any, kind: str, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, task(kind), {"stage": stage}))


@pytest.mark.parametrize("task", [Outside(), Regularised(), ParameterReturned()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 2), (2, 3)])
def test_parameters_may_be_used_outside_their_module(ranks: Any, task: Task, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


def test_a_type_with_its_own_output_class_is_kept(ranks: Any) -> None:
    assert ranks(1, kept_types) == [["dict", "tuple", "Pair", "Output", "Holder", "list"]]


def kept_types(rank: int, world_size: int) -> list[str]:
    names = []
    for kind in KINDS:
        model = Whole(kind)
        model, _ = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
        names.append(type(model(x=torch.randn(2, 11))).__name__)
    return names
