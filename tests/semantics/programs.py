"""The same program runs on a plain model and on a sharded one, and must return the same.

A *program* is a function of a model and its optimizer that trains, does something that users do between passes, and
returns what it saw. It runs on plain PyTorch and under every plan; on several ranks all see the same data, so that a
plain model on one rank is the reference there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded

Program = Callable[[nn.Module, Any], Any]

PLANS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"weights": "host", "gradients": "host", "optimizer": "host"},
    "disk": {"weights": "disk", "gradients": "disk", "optimizer": "disk"},
}
ALONE = [(1, "device", 3), (1, "host", 3), (1, "disk", 3)]
WORLDS = [*ALONE, (2, "device", 0), (2, "device", 1), (2, "host", 2), (2, "disk", 3)]
"""Ranks, plan, stage: every stage, every tier, one rank and two."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 13), nn.Linear(13, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers of the root; with `twice`, one block runs two times."""

    def __init__(self, width: int = 7, depth: int = 3, *, twice: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(self.blocks[0](x) if self.twice else x)


def data(step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1 + step))


def make(build: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return build()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def step(model: nn.Module, optimizer: Any, number: int = 0) -> float:
    """One ordinary step."""
    loss = model(data(number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def run_sharded(
    rank: int,
    world_size: int,
    program: Program,
    plan: str,
    stage: int,
    build: Any,
    optimizer: Any,
    extra: dict[str, Any],
) -> Any:
    model = make(build)
    chosen = {**PLANS[plan], "stage": stage, **extra}
    if world_size > 1 and stage < 3:
        chosen.pop("weights", None)
    model, sharded = unbounded.shard(model, optimizer(model), chosen)
    return program(model, sharded)


def run_plain(program: Program, build: Any = Net, optimizer: Any = adamw) -> Any:
    model = make(build)
    return program(model, optimizer(model))


def assert_same(found: Any, expected: Any, path: str = "result") -> None:
    """Equal to fp32 rounding, whatever it is made of."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), path
        torch.testing.assert_close(
            found.detach().cpu(), expected.detach(), rtol=2e-5, atol=2e-6, msg=lambda m: f"{path}: {m}"
        )
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), path
    else:
        assert found == expected, path


def compare(
    ranks: Any, world: tuple[int, str, int], program: Program, build: Any = Net, optimizer: Any = adamw, **extra: Any
) -> None:
    """`program` under the plan of `world` against plain PyTorch."""
    world_size, plan, stage = world
    expected = run_plain(program, build, optimizer)
    for found in ranks(world_size, run_sharded, program, plan, stage, build, optimizer, extra):
        assert_same(found, expected)


def compare_in(
    precision: str, ranks: Any, world: tuple[int, str, int], program: Program, build: Any = Net, optimizer: Any = adamw
) -> None:
    """`program` in 16 bits under the plan of `world`, against one rank with everything on the device."""
    world_size, plan, stage = world
    extra = {"precision": precision, "loss_scale": 1, "loss_scale_window": 0}
    expected = run_sharded(0, 1, program, "device", 3, build, optimizer, extra)
    for found in ranks(world_size, run_sharded, program, plan, stage, build, optimizer, extra):
        assert_same(found, expected)
