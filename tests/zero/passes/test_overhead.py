"""What a steady step costs: Python code per unit and not per parameter, and no new memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.counting import watched_lines
from tests.zero.training import shard
from unbounded.native.disk.extents import ExtentStore
from unbounded.tiers.arena import HostArena
from unbounded.tiers.pool import BufferPool
from unbounded.zero.parameters import views


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


@pytest.mark.parametrize(("tier", "are_set"), [("device", False), ("host", True)])
def test_weights_that_stay_are_saved_without_hooks(tier: str, are_set: bool) -> None:
    hooks = []
    model = nn.Sequential(*(Many(4) for _ in range(3)))
    model[1].register_forward_hook(lambda *_: hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True)))
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"weights": tier})
    for _ in range(3):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    assert [bool(hook) for hook in hooks] == [are_set] * 3


def test_forwards_without_a_step_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_SOME_GIVEN", 50)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {})
    first = model(torch.ones(2, 8)).sum()
    for _ in range(100):
        model(torch.ones(2, 8)).sum().backward()
    assert max(len(unit.views._given) for unit in optimizer.engine.units) <= 60
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # it was not forgotten
        first.backward()


def allocations_of_steps(rank: int, world_size: int, folder: str, plan: dict[str, Any]) -> list[int]:
    """How often each step asked the system for host memory or the store for an extent."""
    asked, counts = [0], []

    def counting(real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            asked[0] += 1
            return real(*arguments, **keywords)

        return call

    pools: list[BufferPool] = []
    make_pool = BufferPool.__init__

    def remember(pool: BufferPool, *arguments: Any) -> None:
        make_pool(pool, *arguments)
        pools.append(pool)

    real = HostArena.allocate, ExtentStore.allocate
    BufferPool.__init__ = remember  # type: ignore[method-assign]
    HostArena.allocate, ExtentStore.allocate = map(counting, real)  # type: ignore[method-assign]
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {**plan, "disk_path": folder})
        for _ in range(5):
            asked[0] = 0
            for _ in range(2):
                model(torch.ones(2, 64)).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.wait()
            counts.append(asked[0])
            fill(pools)
    finally:
        BufferPool.__init__ = make_pool  # type: ignore[method-assign]
        HostArena.allocate, ExtentStore.allocate = real  # type: ignore[method-assign]
    return counts


def fill(pools: list[BufferPool]) -> None:
    """Makes all buffers of the pools now. Otherwise timing would decide when, by how many are out at once."""
    for pool in pools:
        leases = [pool.lease() for _ in range(pool.count)]
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("activations", [None, "host"])
def test_a_steady_step_takes_no_new_memory(
    ranks: Any, tmp_path: Path, world_size: int, tier: str, activations: str | None
) -> None:
    plan = {**dict.fromkeys(("weights", "gradients", "optimizer"), tier), "activations": activations}
    for counts in ranks(world_size, allocations_of_steps, str(tmp_path), plan):
        assert counts[0] > 0  # the first makes its buffers
        assert counts[2:] == [0, 0, 0]
