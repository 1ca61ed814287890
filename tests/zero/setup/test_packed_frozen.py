"""Frozen weights that are packed train, change, thaw and are saved as those that are not, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.ranks import run_ranks
from unbounded.planner.models.packed_size import RECORD_BYTES, RECORD_NUMEL
from unbounded.sharding.running import sharded
from unbounded.tiers.packed.packed_array import PackedArray

WIDTH = 256


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


def make(**fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    with torch.no_grad():
        model[1].base.weight[::2] *= 1e-15  # exponents too far apart to be packed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return unbounded.shard(model, optimizer, plan={"precision": "bf16", **fields})


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = (model(torch.randn(4, WIDTH, dtype=torch.bfloat16)) - 1).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def live(folder: str, **fields: Any) -> list[Any]:
    """What a program sees that trains, writes to frozen weights, saves, thaws a block, and goes on from what it saved
    with another plan."""
    model, optimizer = make(disk_path=folder, **fields)
    seen: list[Any] = [step(model, optimizer, seed) for seed in range(2)]
    with unbounded.full_params(model):
        model[0].base.weight.mul_(1.5)
        model[2].base.weight[3:7] = 1e-30
    seen.append(step(model, optimizer, 2))
    with unbounded.full_params(model):
        model[2].base.weight.add_(0.25)  # and now they can be packed
    seen.append(step(model, optimizer, 3))
    name = "packed" if fields.get("pack_frozen") else "plain"
    unbounded.save(f"{folder}/{name}", model, optimizer)
    model[1].base.requires_grad_(True)
    seen += [step(model, optimizer, seed) for seed in (4, 5)]
    seen += [model.state_dict(), is_packed(model)]
    other, other_optimizer = make(disk_path=folder, **fields | {"pack_frozen": not fields.get("pack_frozen")})
    unbounded.load(f"{folder}/{name}", other, other_optimizer)
    return [*seen, step(other, other_optimizer, 6), other.state_dict()]


def is_packed(model: nn.Module) -> list[bool]:
    return [isinstance(unit.weights, PackedArray) for unit in sharded(model).engine.units if "frozen" in unit.name]


def both(rank: int, world_size: int, folder: str, tier: str) -> None:
    own = Path(folder) / str(world_size)
    own.mkdir(parents=True, exist_ok=True)
    packed = live(str(own), weights=tier, pack_frozen=True)
    plain = live(str(own), weights=tier, pack_frozen=False)
    for one, other in zip(packed, plain, strict=True):
        if isinstance(one, dict):
            assert list(one) == list(other)
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
        elif isinstance(one, list):
            assert (one, other) == ([True] * 3, [False] * 3)
        else:
            assert one == other


@pytest.mark.every_second
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_weights_live_as_plain_ones(tmp_path: Path, tier: str, world_size: int) -> None:
    run_ranks(world_size, both, str(tmp_path), tier)


def test_they_take_less_and_memory_says_so() -> None:
    used = {}
    for packs in (True, False):
        _, optimizer = make(weights="host", pack_frozen=packs, early_units=0)
        used[packs] = optimizer.memory()["host"].used_bytes
    records = -(-WIDTH * (WIDTH + 1) // RECORD_NUMEL)
    saved = 3 * (2 * WIDTH * (WIDTH + 1) - records * RECORD_BYTES)
    loose = 2 * WIDTH // (RECORD_NUMEL // WIDTH) * RECORD_NUMEL  # one block's weights, but not its bias
    assert used[False] - used[True] == saved - loose


def test_only_bf16_that_is_off_the_device_is_packed() -> None:
    for fields in ({"precision": "fp32", "weights": "host"}, {"precision": "fp16", "weights": "host"}, {}):
        model, _ = make(**{"weights": "device", **fields, "pack_frozen": True})
        assert is_packed(model) == [False] * 3
