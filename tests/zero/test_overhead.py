"""The engine's Python runs per unit: a block of 64 parameters costs the same lines of it as a block of 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.counting import watched_lines
from tests.zero.training import shard


class Many(nn.Module):
    """A block of `count` parameters whose use is one operation."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(8)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(list(self.parameters())).sum(0)


def lines_of_a_step(rank: int, world_size: int, counts: list[int], plan: dict[str, Any]) -> list[dict[str, int]]:
    found = []
    for count in counts:
        model = nn.Sequential(*(Many(count) for _ in range(3)))
        with watched_lines() as lines:
            model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {**plan, "unit_numel": 1})
            for step in range(4):
                optimizer.wait()
                lines.active = step == 3
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            lines.active = False
        found.append(dict(lines.count))
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_lines_of_python_do_not_grow_with_the_number_of_parameters(ranks: Any, world_size: int, stage: int) -> None:
    for few, many in ranks(world_size, lines_of_a_step, [4, 64], {"stage": stage}):
        assert sum(few.values()) > 20  # the trace sees the engine at all
        grown = {name: (few.get(name, 0), count) for name, count in many.items() if count > few.get(name, 0) + 16}
        assert not grown
