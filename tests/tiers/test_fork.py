"""Forks at any moment: the parent trains on as if there had been none, and a child cannot hang on what it inherits."""

from __future__ import annotations

import gc
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.ranks import HANG_SECONDS
from tests.tiers.forking import Child, error_in_child
from tests.warm import warm_python
from tests.zero.training import Batch, TinyGPT, shard
from unbounded.native import kernels
from unbounded.native.disk import ExtentStore
from unbounded.native.host_memory import host_buffer
from unbounded.native.thread_pool import Pool, default_pool

TIERS = ("device", "host", "disk")
BELONGS = r"belongs to process \d+, but this is process \d+, forked from it"


def make(tier: str, folder: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = TinyGPT()
    plan = {**dict.fromkeys(("weights", "gradients", "optimizer"), tier), "disk_path": str(folder)}
    return shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    return model.loss(Batch(step, 0, rank).tokens())  # type: ignore[no-any-return, operator]


def train(model: nn.Module, optimizer: Any, steps: range, *, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def look_around() -> bool:
    """What a data worker may do: use torch and the kernels, collect garbage."""
    gc.collect()
    return kernels.sum_squares(torch.ones(100_000)) == 100_000


class Bystander:
    """Forks children that do not touch the model, and collects them at the end."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def fork(self) -> None:
        self.children.append(Child(look_around, exits=len(self.children) % 2 == 0))

    def collect(self) -> None:
        assert [child.result() for child in self.children] == [True] * len(self.children)


def train_with_forks(rank: int, world_size: int, tier: str, folder: str, *, forks: bool = True) -> list[float]:
    """Three steps and a save in the background, with a fork at every moment that differs from the others."""
    bystander = Bystander()
    fork: Callable[[], None] = bystander.fork if forks else lambda: None
    gc.collect()  # a process group of the last case: torch crashes where a child destroys one
    fork()  # before shard
    model, optimizer = make(tier, Path(folder))
    fork()  # after shard
    losses = train(model, optimizer, range(1), rank=rank)
    fork()  # while updates run
    loss = loss_of(model, 1, rank)
    fork()  # between forward and backward
    loss.backward()
    fork()  # while gradients are on their way
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    handle = unbounded.save(f"{folder}/saved-{forks}", model, optimizer, wait=False)
    fork()  # while a save runs
    losses += train(model, optimizer, range(2, 4), rank=rank)
    handle.wait()
    unbounded.save(f"{folder}/saved-{forks}", model, optimizer)  # the children may still have the lock's descriptor
    with unbounded.full_params(model):
        fork()
    losses += train(model, optimizer, range(4, 5), rank=rank)
    bystander.collect()
    return losses


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_forks_at_any_moment_change_nothing_for_the_parent_and_hang_no_child(
    ranks: Any, tmp_path: Path, tier: str, world_size: int
) -> None:
    forked = ranks(world_size, train_with_forks, tier, str(tmp_path), timeout=2 * HANG_SECONDS)
    plain = ranks(world_size, train_without_forks, tier, str(tmp_path), timeout=2 * HANG_SECONDS)
    assert forked == plain


def train_without_forks(rank: int, world_size: int, tier: str, folder: str) -> list[float]:
    return train_with_forks(rank, world_size, tier, folder, forks=False)


@pytest.mark.parametrize("tier", TIERS)
def test_a_child_that_uses_the_model_is_told_at_once_whose_it_is(tmp_path: Path, tier: str) -> None:
    model, optimizer = make(tier, tmp_path)
    train(model, optimizer, range(1))
    loss = loss_of(model, 1)
    handle = unbounded.save(tmp_path / "saved", model, optimizer, wait=False)
    tokens, parameter, values = Batch(2, 0, 0).tokens(), next(model.parameters()), dict(model.state_dict())
    uses: list[Callable[[], Any]] = [
        lambda: model(tokens),
        lambda: torch.no_grad()(model)(tokens),
        loss.backward,
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        optimizer.zero_grad,
        optimizer.wait,
        model.state_dict,
        lambda: model.load_state_dict(values),
        lambda: unbounded.save(tmp_path / "other", model, optimizer),
        lambda: unbounded.load(tmp_path / "saved", model, optimizer),
        lambda: unbounded.export(tmp_path / "exported", model),
        lambda: unbounded.full_params(model).__enter__(),
        handle.wait,
    ]
    if tier != "device":  # values in the process's own memory may be read
        uses.append(lambda: parameter.sum().item())
    for use in uses:
        assert re.search(BELONGS, error_in_child(use)), use  # torch reports errors of a load inside its own
    assert error_in_child(lambda: model(tokens)).startswith("StateError: this sharded model belongs to process")
    handle.wait()
    loss.backward()
    optimizer.step()  # the parent goes on
    optimizer.wait()
    assert not (tmp_path / "other").exists()


def test_a_child_may_shard_a_model_of_its_own(tmp_path: Path) -> None:
    model, optimizer = make("disk", tmp_path)
    expected = train(model, optimizer, range(2))

    def own() -> list[float]:
        losses = train(*make("disk", tmp_path), range(2))
        gc.collect()
        return losses

    assert Child(own, exits=True).result() == expected


def test_forks_in_a_storm_of_updates_hang_nobody(tmp_path: Path) -> None:
    """Other threads hold locks at the moment of a fork, different ones each time."""
    model, optimizer = make("disk", tmp_path)
    for step in range(12):
        train(model, optimizer, range(step, step + 1))
        child = Child(look_around, exits=step % 2 == 0)
        train(model, optimizer, range(step, step + 1))
        assert child.result()


LOADER = """
import sys, torch, unbounded
from torch.utils.data import DataLoader, TensorDataset

def train(num_workers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(model, optimizer, {"optimizer": "host"})
    loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=num_workers)
    for epoch in range(3):
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()

assert train(2) == train(0)
"""


def test_the_loop_of_the_readme_trains_with_data_workers() -> None:
    command = [warm_python(), "-c", LOADER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr


def test_a_child_finds_host_buffers_empty_and_the_parent_keeps_them() -> None:
    buffer = host_buffer(3 << 20).fill_(7)
    assert Child(lambda: int(buffer.max())).result() == 0
    assert int(buffer.min()) == 7


def test_pools_and_stores_belong_to_the_process_that_made_them(tmp_path: Path) -> None:
    pool, store = Pool(3), ExtentStore(tmp_path, 8192)
    extent, values = store.allocate(4096), torch.ones(100_000)
    write = store.write(extent, host_buffer(4096))
    write.wait()
    assert "this pool of threads belongs to process" in error_in_child(lambda: kernels.sum_squares(values, pool))
    assert f"the disk engine with {tmp_path} belongs to" in error_in_child(
        lambda: store.read(extent, host_buffer(4096))
    )
    assert "this disk transfer belongs to process" in error_in_child(write.wait)
    default = default_pool()
    assert Child(lambda: (default_pool() is not default, pool.close(), store.close())).result()[0]
    assert kernels.sum_squares(values, pool) == 100_000
    store.read(extent, host_buffer(4096)).wait()
    store.close()
    pool.close()


def test_a_closed_store_gives_its_space_back_while_a_child_has_its_file(tmp_path: Path) -> None:
    store = ExtentStore(tmp_path, 1 << 20)
    held = os.dup(store._files[0]._fd)  # what a child of a fork has
    assert os.fstat(held).st_blocks > 0
    store.close()
    assert os.fstat(held).st_blocks == 0
    os.close(held)
