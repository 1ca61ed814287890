"""Weights on disk are read while the units before them are used, and freed if nobody comes for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.ranks import HANG_SECONDS, run_ranks
from unbounded.sharding.running import sharded
from unbounded.tiers.array import DiskArray
from unbounded.zero.unit import Unit

WIDTH, DEPTH = 16, 12
ON_DISK = (3, 9)


class Tower(nn.Module):
    """Blocks that may be left out, and that tell when they are about to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH))
        self.left_out: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            self.before(index)
            x = x if index in self.left_out else torch.tanh(block(x))
        return x

    def before(self, index: int) -> None:
        pass


def make(folder: Path, **fields: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Tower()
    plan = {
        "weights": [*((f"blocks.{index}", "disk") for index in ON_DISK), ("*", "host")],
        "optimizer": "host",
        "disk_path": str(folder),
        **fields,
    }
    return unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)


def step(model: Any, optimizer: Any, seed: int) -> float:
    loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def before_reads_of_block_9(model: Any, act: Callable[[], None], patched: pytest.MonkeyPatch) -> None:
    unit = next(unit for unit in sharded(model).engine.units if unit.name == "blocks.9")
    fetch = DiskArray.fetch

    def watched(array: DiskArray, *arguments: Any) -> Any:
        if array is unit.weights:
            act()
        return fetch(array, *arguments)

    patched.setattr(DiskArray, "fetch", watched)


def test_the_next_unit_on_disk_is_read_while_those_before_it_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 5 waits until block 9 is being read, though only two units are fetched ahead."""
    model, optimizer = make(tmp_path)
    step(model, optimizer, 0)
    optimizer.wait()
    is_read = threading.Event()
    before_reads_of_block_9(model, is_read.set, monkeypatch)
    waited = []
    monkeypatch.setattr(
        Tower, "before", lambda _, index: waited.append(is_read.wait(HANG_SECONDS)) if index == 5 else None
    )
    step(model, optimizer, 1)
    assert waited == [True]


def losses_of(folder: Path, **fields: Any) -> list[float]:
    """The last steps leave out blocks that are expected, on disk and not."""
    model, optimizer = make(folder, **fields)
    losses, state = [], sharded(model)
    for seed, left_out in enumerate([(), (), (9,), (2, 3, 4, 9, 10), (9,), ()]):
        model.left_out = set(left_out)
        losses.append(step(model, optimizer, seed))
        optimizer.wait()
        assert all(unit.reading is None for unit in state.engine.units)
        assert not any(unit.backing.is_there for unit in state.engine.units)
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))
    return losses


def test_what_was_read_for_a_block_that_does_not_run_is_freed(tmp_path: Path) -> None:
    assert losses_of(tmp_path) == losses_of(tmp_path, weights="host")


def losses_here(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    return losses_of(Path(folder)), losses_of(Path(folder), weights="host")


def test_ranks_read_their_parts_ahead(tmp_path: Path) -> None:
    for on_disk, on_host in run_ranks(2, losses_here, str(tmp_path)):
        assert on_disk == on_host


def test_a_read_ahead_that_fails_is_an_error_of_the_pass_that_needed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    model, optimizer = make(tmp_path)
    step(model, optimizer, 0)
    optimizer.wait()
    with monkeypatch.context() as patched:
        before_reads_of_block_9(model, fail, patched)
        model.left_out = {9}
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))  # which does not need it
        model.left_out = set()
        with pytest.raises(OSError, match="the disk is gone"):
            model(torch.zeros(1, WIDTH))
    assert step(model, optimizer, 1) > 0
    assert all(unit.reading is None for unit in sharded(model).engine.units)


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_without_memory_for_a_read_the_pass_fails_and_the_next_one_runs(
    num_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward and in a backward, when it is due and when it is ahead."""
    model, optimizer = make(tmp_path, prefetch_units=num_ahead)
    expected = [step(model, optimizer, seed) for seed in range(3)]
    model, optimizer = make(tmp_path, prefetch_units=num_ahead)
    losses, allocate = [step(model, optimizer, 0)], Unit.allocate
    for fails_at in (1, 2):
        left = fails_at

        def failing(unit: Unit) -> None:
            nonlocal left
            left -= unit.name == "blocks.9"
            if left == 0:
                raise MemoryError("none left")
            allocate(unit)

        optimizer.wait()
        with monkeypatch.context() as patched:
            patched.setattr(Unit, "allocate", failing)
            with pytest.raises(MemoryError, match="none left"):
                step(model, optimizer, fails_at)
        optimizer.zero_grad()
        assert all(unit.reading is None for unit in sharded(model).engine.units)
        losses.append(step(model, optimizer, fails_at))
    assert losses == expected
