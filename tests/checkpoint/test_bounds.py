"""What a checkpoint costs: bytes are read and written once, nothing is copied without need, and buffers are bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import assert_same, whole
from tests.ranks import HANG_SECONDS
from unbounded.checkpoint import loading
from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.parsing import read_manifest
from unbounded.checkpoint.load.load_plan import Copy, direct_target
from unbounded.checkpoint.load.transfer import Transfer
from unbounded.checkpoint.save import save_job, writer
from unbounded.errors import CheckpointError
from unbounded.native.disk import DiskFile
from unbounded.sharding.running import sharded
from unbounded.tiers.arena import HostArena
from unbounded.tiers.array import MemoryArray
from unbounded.tiers.budget import size_buffers
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.staging import size_staging
from unbounded.zero.parameters.writes import CHECKED_FORWARDS

MIB = 1 << 20


def build(tier: str, seed: int = 0, **fields: Any) -> Any:
    """48 MiB of states in four units."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = {"precision": "bf16", "weights": tier, "optimizer": tier, "gradients": "device", **fields}
    model, optimizer = unbounded.shard(model, optimizer, plan)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.wait()


def test_a_save_writes_and_a_load_reads_every_byte_once(tmp_path: Path, monkeypatch: Any) -> None:
    moved = {"read": 0, "write": 0}
    for name in moved:
        move = getattr(DiskFile, name)

        def counted(
            self: Any, offset: int, tensor: torch.Tensor, *sums: Any, name: str = name, move: Any = move
        ) -> Any:
            moved[name] += tensor.numel() * tensor.element_size()
            return move(self, offset, tensor, *sums)

        monkeypatch.setattr(DiskFile, name, counted)
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    model, optimizer = build("host")
    unbounded.save(tmp_path / "c", model, optimizer)
    total = read_manifest(tmp_path / "c").num_bytes
    assert 48 * MIB < total < 49 * MIB
    assert moved == {"read": 0, "write": total}
    unbounded.load(tmp_path / "c", model, optimizer)
    assert total * 0.98 < moved["read"] < total * 1.02


def test_states_in_host_memory_are_written_and_read_without_a_copy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    staged: list[int] = []
    lease = ItemPipeline.lease
    monkeypatch.setattr(ItemPipeline, "lease", lambda self: (staged.append(1), lease(self))[1])
    model, optimizer = build("host")
    unbounded.save(tmp_path / "c", model, optimizer)
    assert len(staged) == 1  # what is small: the random states
    addresses = {
        (array.direct.data_ptr(), array.direct.data_ptr() + array.direct.nbytes)
        for unit in sharded(model).engine.units
        for array in (unit.weights, *unit.states.values())
    }
    read = Files.read
    inside: list[int] = []

    def watched(self: Any, number: int, offset: int, target: torch.Tensor) -> Any:
        if any(start <= target.data_ptr() < stop for start, stop in addresses):
            inside.append(target.numel())
        return read(self, number, offset, target)

    monkeypatch.setattr(Files, "read", watched)
    unbounded.load(tmp_path / "c", model, optimizer)
    assert sum(inside) > 0.9 * 48 * MIB


class Peak:
    """The most that a model's host tier has counted since `reset`."""

    def __init__(self, model: nn.Module, monkeypatch: Any) -> None:
        self.arena = sharded(model).tiers.arena
        self.reset()
        allocate = type(self.arena).allocate

        def watched(arena: Any, *arguments: Any, **options: Any) -> Any:
            made = allocate(arena, *arguments, **options)
            if arena is self.arena:
                self.bytes = max(self.bytes, arena.used_bytes)
            return made

        monkeypatch.setattr(type(self.arena), "allocate", watched)

    def reset(self) -> None:
        self.bytes = self.arena.used_bytes


def test_states_on_disk_pass_through_a_few_buffers_that_stay(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    model, optimizer = build("disk", host_bytes=96 * MIB)
    peak, pool = Peak(model, monkeypatch), sharded(model).tiers.staging
    assert (pool.count, pool.buffer_bytes) == (4, MIB)  # of a sixteenth of 96 MiB
    before = peak.bytes
    unbounded.save(tmp_path / "c", model, optimizer)
    assert 0 < peak.bytes - before <= 4 * MIB
    made = peak.arena.used_bytes
    for _ in range(2):
        unbounded.save(tmp_path / "c", model, optimizer)
        unbounded.load(tmp_path / "c", model, optimizer)
    assert peak.bytes == peak.arena.used_bytes == made
    other, optimizer = build("disk", seed=1, host_bytes=96 * MIB)
    unbounded.load(tmp_path / "c", other, optimizer)
    unbounded.save(tmp_path / "again", other, optimizer)
    assert_same(whole(tmp_path / "again"), whole(tmp_path / "c"))


@pytest.fixture
def gate(monkeypatch: Any) -> Iterator[threading.Event]:
    """Until it is set, a save reads nothing large."""
    gate, begin = threading.Event(), writer.Writer.read

    def held(self: Any, chunk: Any) -> None:
        gate.wait()
        begin(self, chunk)

    monkeypatch.setattr(writer.Writer, "read", held)
    yield gate
    gate.set()


def test_a_step_beside_a_save_that_stands_still_goes_on_with_its_states_copied_aside(
    tmp_path: Path, gate: threading.Event
) -> None:
    model, optimizer = build("host")
    tiers = sharded(model).tiers
    gate.set()
    unbounded.save(tmp_path / "now", model, optimizer)
    gate.clear()
    before = tiers.arena.used_bytes, tiers.planned_host_bytes
    handle = unbounded.save(tmp_path / "background", model, optimizer, wait=False)
    training = threading.Thread(target=step, args=(model, optimizer))
    training.start()
    training.join(HANG_SECONDS)
    assert not training.is_alive()
    assert not handle.done()
    assert tiers.arena.used_bytes - before[0] >= 48 * MIB
    step(model, optimizer)  # what is aside already is not copied again
    assert tiers.arena.used_bytes - before[0] < 49 * MIB
    gate.set()
    handle.wait()
    assert_same(whole(tmp_path / "background"), whole(tmp_path / "now"))
    assert (tiers.arena.used_bytes, tiers.planned_host_bytes) == before


def test_states_are_copied_aside_before_the_step_comes_to_them(
    tmp_path: Path, monkeypatch: Any, gate: threading.Event
) -> None:
    monkeypatch.setattr(save_job.SaveJob, "_copies_ahead", lambda self: self.copy)  # as with a GPU
    model, optimizer = build("host")
    arena = sharded(model).tiers.arena
    gate.set()
    unbounded.save(tmp_path / "now", model, optimizer)
    gate.clear()
    before = arena.used_bytes
    handle = unbounded.save(tmp_path / "background", model, optimizer, wait=False)
    readers = [unit._reader for unit in sharded(model).engine.units]
    for reader in readers:
        reader._launched.wait(HANG_SECONDS)
    assert [reader.launched() for reader in readers] == [True] * 4
    assert 48 * MIB <= arena.used_bytes - before < 49 * MIB
    step(model, optimizer)
    gate.set()
    handle.wait()
    assert_same(whole(tmp_path / "background"), whole(tmp_path / "now"))
    assert arena.used_bytes == before


def add_one(module: nn.Module, arguments: Any) -> None:
    with torch.no_grad():
        module.weight.add_(1)


def write(how: str, model: nn.Module, held: torch.Tensor) -> None:
    weight = model[0].weight
    if how == "by name":
        weight.data[0].add_(1)
    elif how == "held":
        held.mul_(2)
    elif how == "whole":
        weight.copy_(torch.ones(8, 8))
    elif how == "loaded":
        model.load_state_dict({"0.weight": torch.ones(8, 8) * 3})
    elif how == "full_params":
        with unbounded.full_params(model):
            weight.sub_(1)
    else:
        model(torch.ones(2, 8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_to_weights_beside_a_save_is_not_in_it(
    tmp_path: Path, gate: threading.Event, precision: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"precision": precision})
    weight, held = model[0].weight, model[0].weight.data

    def is_kept(how: str) -> bool:
        before = weight.detach().clone()
        gate.clear()
        handle = unbounded.save(tmp_path / "c", model, optimizer, wait=False)
        with torch.no_grad():
            write(how, model, held)
        assert not torch.equal(weight, before), how
        gate.set()
        handle.wait()
        unbounded.load(tmp_path / "c", model, optimizer)
        return torch.equal(weight, before)

    hows = ["by name", "held", "whole", "loaded", "full_params"]
    assert [how for how in hows if not is_kept(how)] == []
    with torch.no_grad():
        for _ in range(CHECKED_FORWARDS):
            model(torch.ones(2, 8))
    model[0].register_forward_pre_hook(add_one)
    with pytest.raises(CheckpointError, match="a forward has written to the weights of unit 'root' while a save"):
        is_kept("by a forward that has not written before")
    assert is_kept("by a forward")


def test_a_step_waits_for_a_save_where_the_budget_has_no_room_for_copies(
    tmp_path: Path, monkeypatch: Any, gate: threading.Event
) -> None:
    model, optimizer = build("host", host_bytes=(48 + 24) * MIB)
    peak = Peak(model, monkeypatch)
    gate.set()
    unbounded.save(tmp_path / "now", model, optimizer)
    gate.clear()
    handle = unbounded.save(tmp_path / "background", model, optimizer, wait=False)
    training = threading.Thread(target=step, args=(model, optimizer))
    training.start()
    training.join(0.5)
    assert training.is_alive()
    gate.set()
    training.join()
    handle.wait()
    assert_same(whole(tmp_path / "background"), whole(tmp_path / "now"))
    assert peak.bytes <= (48 + 24) * MIB


def test_what_a_save_is_reading_is_not_overwritten_before_it_was_read(tmp_path: Path, monkeypatch: Any) -> None:
    gate, reached, finish = threading.Event(), threading.Event(), writer.Writer.finish

    def held(self: Any, chunk: Any) -> None:
        reached.set()
        gate.wait()
        finish(self, chunk)

    model, optimizer = build("host")
    unbounded.save(tmp_path / "now", model, optimizer)
    monkeypatch.setattr(writer.Writer, "finish", held)
    handle = unbounded.save(tmp_path / "background", model, optimizer, wait=False)
    reached.wait()  # the first chunks are on their way to the disk from where they are
    training = threading.Thread(target=step, args=(model, optimizer))
    training.start()
    training.join(0.5)
    assert training.is_alive()
    gate.set()
    training.join()
    handle.wait()
    assert_same(whole(tmp_path / "background"), whole(tmp_path / "now"))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_checkpoints_keep_within_the_hosts_budget(tmp_path: Path, monkeypatch: Any, tier: str) -> None:
    budget = (48 + 24) * MIB if tier == "host" else 24 * MIB  # the states, and what their buffers need
    model, optimizer = build(tier, host_bytes=budget)
    peak = Peak(model, monkeypatch)
    unbounded.save(tmp_path / "c", model, optimizer)
    handle = unbounded.save(tmp_path / "c", model, optimizer, wait=False)
    step(model, optimizer)
    handle.wait()
    transfers: list[bool] = []
    transfer = loading.Transfer
    monkeypatch.setattr(
        loading, "Transfer", lambda *args, staged: (transfers.append(staged), transfer(*args, staged=staged))[1]
    )
    unbounded.load(tmp_path / "c", model, optimizer)
    assert transfers == [False]  # 48 MiB would wait in memory, as they do where the budget has room
    assert peak.bytes <= budget
    other, optimizer = build(tier)
    unbounded.load(tmp_path / "c", other, optimizer)
    assert transfers == [False, True]


def test_a_plan_sets_the_staging_buffers_aside() -> None:
    assert size_staging(None) == size_staging(64 << 30) == (8, 16 * MIB)
    assert size_staging(1 << 30) == (8, 8 * MIB)
    assert size_staging(0) == (2, MIB)
    for host in (16 * MIB, 1 << 30, 64 << 30):
        count, buffer_bytes = size_staging(host)
        with_staging = size_buffers(host, 5)
        alone = replace(with_staging, staging_bytes=0)
        assert with_staging.num_bytes == alone.num_bytes + count * buffer_bytes


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_failure_in_the_middle_gives_every_buffer_back(
    tmp_path: Path, monkeypatch: Any, tier: str, operation: str
) -> None:
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    model, optimizer = build(tier, host_bytes=96 * MIB)
    unbounded.save(tmp_path / "c", model, optimizer)
    pool, move, calls = sharded(model).tiers.staging, getattr(DiskFile, operation), [0]

    class Failed:
        def wait(self) -> None:
            raise unbounded.errors.DiskError(5, "the disk failed")

    def failing(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        return Failed() if calls[0] % 7 == 0 else move(self, *arguments)

    work = unbounded.save if operation == "write" else unbounded.load
    with monkeypatch.context() as patched:
        patched.setattr(DiskFile, operation, failing)
        with pytest.raises(unbounded.errors.DiskError, match="the disk failed"):
            work(tmp_path / "c", model, optimizer)
    assert calls[0] >= 7
    assert len(pool._free) == pool._made > 0
    unbounded.load(tmp_path / "c", model, optimizer)
    unbounded.save(tmp_path / "again", model, optimizer)
    assert_same(whole(tmp_path / "again"), whole(tmp_path / "c"))


def test_the_padding_after_a_copy_is_read_only_into_what_follows_its_array() -> None:
    arena = HostArena(pin=False, num_threads=1)
    held = arena.allocate(torch.float32, 1500)  # 6000 bytes of two pages
    array = MemoryArray(held, "host")
    last = direct_target(Copy(0, 0, 6000, array, 0), 0, 8192)
    assert last is not None
    assert (last.data_ptr(), last.numel()) == (held.data_ptr(), 8192)
    assert direct_target(Copy(0, 0, 5000, array, 0), 0, 8192) is None  # elements of the array follow
    assert direct_target(Copy(0, 0, 6000, array, 0), 0, 12288) is None  # more than the rest of a page
    assert direct_target(Copy(0, 512, 5488, array, 512), 0, 8192) is None  # bytes before the copy
    exact = MemoryArray(torch.zeros(1500), "device")  # torch's own memory ends with the tensor
    assert direct_target(Copy(0, 0, 6000, exact, 0), 0, 8192) is None
    middle = direct_target(Copy(0, 8192, 4096, exact, 1024), 8192, 12288)
    assert middle is not None
    assert middle.data_ptr() == exact.tensor.data_ptr() + 1024


def test_arrays_of_odd_sizes_are_loaded_into_place_in_few_reads(tmp_path: Path, monkeypatch: Any) -> None:
    """An array is one read: what goes beyond a chunk and a page does not become further reads."""
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1500, 1499) if i % 2 else nn.Linear(1499, 1500) for i in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "host_bytes": 256 * MIB}
    model, optimizer = unbounded.shard(model, optimizer, plan)
    model(torch.randn(2, 1499)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    unbounded.save(tmp_path / "c", model, optimizer)
    starts: list[int] = []
    begin = Transfer.read
    monkeypatch.setattr(Transfer, "read", lambda self, chunk: (starts.append(chunk.start), begin(self, chunk))[1])
    unbounded.load(tmp_path / "c", model, optimizer)
    arrays = [a for unit in sharded(model).engine.units for a in (unit.weights, *unit.states.values())]
    assert len(starts) == len(arrays) == 16
    unbounded.save(tmp_path / "again", model, optimizer)
    assert_same(whole(tmp_path / "again"), whole(tmp_path / "c"))
