"""A bit that flips on the disk under weights, states or gradients: noticed by all ranks, never trained on or saved."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.native.faults import flip_bit
from tests.tiers.test_disk_faults_in_a_step import describe, make, train
from tests.zero.training import Batch
from unbounded.errors import DiskError
from unbounded.sharding.running import sharded
from unbounded.tiers.array import DiskArray

KINDS = ("weights", "exp_avg", "exp_avg_sq", "gradient")


def array_of(unit: Any, kind: str) -> DiskArray:
    found = {"weights": unit.weights, "gradient": unit.gradient.store.array, **unit.states}[kind]
    assert isinstance(found, DiskArray)
    return found


def flip(array: DiskArray) -> None:
    flip_bit(array._store, array._extent, array.numel * array.dtype.itemsize // 2)


def attempt(act: Any) -> dict[str, Any]:
    try:
        act()
    except Exception as error:
        return describe(error)
    return {"type": None, "text": ""}


def flip_in_a_step(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    """Flips a bit on the last rank, goes on, tries to save, and goes back to the last checkpoint."""
    model, optimizer = make(folder)
    train(model, optimizer, rank, 0, 1)
    unbounded.save(f"{folder}/good", model, optimizer)
    expected = train(model, optimizer, rank, 1, 2)
    unbounded.load(f"{folder}/good", model, optimizer)

    def act() -> None:
        if kind == "gradient":
            model.loss(Batch(1, 0, rank).tokens()).backward()  # type: ignore[operator]
            for unit in optimizer.engine.units:
                unit.gradient.order_stream()
        if rank == world_size - 1:
            flip(array_of(optimizer.engine.units[1], kind))
        if kind != "gradient":
            model.loss(Batch(1, 0, rank).tokens()).backward()  # type: ignore[operator]
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.wait()

    met = attempt(act)
    saved = attempt(lambda: unbounded.save(f"{folder}/bad", model, optimizer))
    optimizer.zero_grad()
    unbounded.load(f"{folder}/good", model, optimizer)
    return {"met": met, "saved": saved, "same": train(model, optimizer, rank, 1, 2) == expected}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_fails_the_step_and_the_save_on_all_ranks_until_a_load(
    ranks: Any, tmp_path: Path, kind: str, world_size: int
) -> None:
    for rank, found in enumerate(ranks(world_size, flip_in_a_step, str(tmp_path), kind)):
        for met in (found["met"], found["saved"]):
            assert (met["type"], met["errno"], met["path"]) == ("DiskError", errno.EBADMSG, str(tmp_path)), found
            assert "CRC32C differs from that of what was written" in met["text"]
            assert f" of {tmp_path}" in met["text"]
            assert "failed at offset " in met["text"]
            assert met["text"].startswith(f"rank {world_size - 1} failed: ") == (rank < world_size - 1)
        assert found["same"]
    assert not (tmp_path / "bad").exists()


def test_the_plan_turns_checksums_off_and_their_memory_with_them(tmp_path: Path) -> None:
    from tests.tiers.test_disk_faults_in_a_step import ON_DISK
    from tests.zero.training import TinyGPT, shard

    held = {}
    for checksums in (True, False):
        torch.manual_seed(3)
        model = TinyGPT()
        plan = {**ON_DISK, "disk_path": str(tmp_path), "disk_checksums": checksums}
        model, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)
        held[checksums] = optimizer.memory()["host"].used_bytes
        disk = optimizer.tiers._stores[0].capacity_bytes
        train(model, optimizer, 0, 0, 1)
        flip(array_of(optimizer.engine.units[1], "exp_avg"))
        if checksums:
            with pytest.raises(DiskError, match="CRC32C differs"):
                train(model, optimizer, 0, 1, 1)
        else:
            train(model, optimizer, 0, 1, 1)
    # Besides checksums there are buffers, as many as lanes that met.
    assert (held[True] - held[False]) % sharded(model).bounce.buffer_bytes == disk // 1024


def test_a_plan_with_checksums_that_are_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(unbounded.errors.PlanError, match="disk_checksums is 'no', but it must be one of True, False"):
        unbounded.Plan(disk_checksums="no")  # type: ignore[arg-type]
