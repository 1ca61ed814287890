"""Budgets are promises: what is counted, what the system sees, and an error before anything is allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.ranks import HANG_SECONDS
from unbounded.errors import BudgetError, DiskError
from unbounded.native.disk import ExtentStore
from unbounded.sharding import running
from unbounded.tiers import arena, tiers
from unbounded.tiers import budget as budgets

MIB = 2**20
WIDTH, DEPTH = 512, 20
NUMEL = DEPTH * (WIDTH * WIDTH + WIDTH)  # 5.2 million: 60 MiB of states with 12 bytes each
STATES = 12 * NUMEL
HOST = STATES // 2
DEVICE = 16 * 2**20
ALLOWANCE = 8 * 2**20
"""For what is no state: activations, gradients of units on their way to their tier, stacks and heaps of threads."""


class Stack(nn.Module):
    """Units of half a MiB of weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def shard_stack(folder: Path | str, **fields: Any) -> tuple[nn.Module, Any]:
    """On the meta device, so that the process never holds the model's first values at once."""
    with torch.device("meta"):
        model = Stack()
    plan = {"precision": "bf16", "device_bytes": DEVICE, "host_bytes": HOST, "disk_path": str(folder), **fields}
    return unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan)


def train(model: nn.Module, optimizer: Any, look: Any = lambda: None, steps: int = 3) -> list[float]:
    batch, losses = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        loss = model(batch).float().square().mean()
        look()
        loss.backward()
        losses.append(float(loss.detach()))
        look()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        look()
        optimizer.zero_grad()
    optimizer.wait()
    look()
    return losses


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Weights and optimizer states by tier."""
    held = dict.fromkeys(("device", "host", "disk"), 0)
    for unit in running.sharded(model).engine.units:
        for array in (unit.weights, *unit.states.values()):
            held[array.tier] += array.numel * array.dtype.itemsize
    return held


CHILD = """
import sys, torch
from tests.process import Peak
from tests.tiers import test_budget as case

torch.set_num_threads(1)
case.train_warm(torch.nn.Sequential(torch.nn.Linear(64, 64)), sys.argv[1])
with Peak() as peak:
    model, optimizer = case.shard_stack(sys.argv[1])
    losses = case.train(model, optimizer)
held = case.held_bytes(model)
assert losses[-1] < losses[0], losses
print(sum(held.values()), held["disk"], peak.grown_bytes)
"""


def train_warm(model: nn.Module, folder: str) -> None:
    """One step of a tiny model: the native core, its threads and its first allocations are not part of the budget."""
    plan = {"precision": "bf16", "optimizer": "disk", "weights": "disk", "disk_path": folder}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    model(torch.randn(8, 64)).float().sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.wait()


def run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    # Buffers of half a MiB then behave like those of real sizes: they leave glibc's heap when they are freed.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_states_of_twice_the_hosts_budget_train_with_the_resident_set_inside_the_budgets(tmp_path: Path) -> None:
    done = run_child(CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    total, on_disk, grown = map(int, done.stdout.split())
    assert total >= 2 * HOST
    assert on_disk > total - HOST - DEVICE
    assert grown <= DEVICE + HOST + ALLOWANCE, f"the resident set grew by {grown / 2**20:.0f} MiB"
    assert grown > total - on_disk


@pytest.mark.parametrize(
    ("device", "host"),
    [(DEVICE, HOST), (4 * 2**20, HOST), (DEVICE, 24 * 2**20), (2**30, 24 * 2**20)],
    ids=["both", "little-device", "little-host", "all-on-device"],
)
def test_what_is_counted_never_exceeds_a_budget(tmp_path: Path, device: int, host: int) -> None:
    model, optimizer = shard_stack(tmp_path, device_bytes=device, host_bytes=host, disk_bytes="1GiB")
    seen: list[dict[str, Any]] = [optimizer.memory()]
    for module in model.layers:  # type: ignore[union-attr]
        module.register_forward_hook(lambda *_: seen.append(optimizer.memory()))
    train(model, optimizer, lambda: seen.append(optimizer.memory()))
    assert len(seen) > 3 * DEPTH
    for use in seen:
        for tier, budget in {"device": device, "host": host, "disk": 2**30}.items():
            assert use[tier].budget_bytes == budget
            assert use[tier].used_bytes <= budget, f"{tier} holds {use[tier].used_bytes} of {budget}"
    held = held_bytes(model)
    assert sum(held.values()) >= STATES
    for tier, count in held.items():
        assert seen[-1][tier].used_bytes >= count


def test_states_that_fit_nowhere_are_an_error_before_anything_is_allocated(tmp_path: Path, monkeypatch: Any) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(tiers, "ExtentStore", lambda *args: opened.append(args))
    monkeypatch.setattr(tiers.HostArena, "allocate", lambda *args, **_: opened.append(args))
    with torch.device("meta"):
        model = Stack()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    plan = {"precision": "bf16", "device_bytes": "8MiB", "host_bytes": "8MiB", "disk_bytes": "8MiB"}
    with pytest.raises(BudgetError) as caught:
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), {**plan, "disk_path": str(tmp_path)})
    text = str(caught.value)
    assert text.startswith("the states take 70.1 MiB on this rank and do not fit: disk is short by ")
    assert "of its 8.0 MiB" in text
    assert "Raise a budget by" in text
    assert isinstance(caught.value, MemoryError)
    assert not opened
    assert not list(tmp_path.iterdir())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_what_the_error_says_would_fit_does_fit(tmp_path: Path) -> None:
    budgets = {"device_bytes": "8MiB", "host_bytes": "16MiB"}
    with pytest.raises(BudgetError) as caught:
        shard_stack(tmp_path, **budgets, disk_bytes="8MiB")
    short = float(str(caught.value).split("disk is short by ")[1].split(" MiB")[0])
    model, optimizer = shard_stack(tmp_path, **budgets, disk_bytes=int((8 + short + 0.1) * 2**20))
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]


def test_a_disk_without_the_room_is_an_error_of_the_disk_before_the_model_is_touched(tmp_path: Path) -> None:
    """The folder has less than the plan says. The store is reserved whole, so the disk cannot run full in a step."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(2**20, 2**20)))  # 12 TiB of states, 2 of them to run it
    plan = {"precision": "bf16", "host_bytes": "1GiB", "device_bytes": "20TiB", "disk_path": str(tmp_path)}
    plan |= dict.fromkeys(("weights", "gradients", "optimizer"), "disk")  # the device has room: no tiles
    with pytest.raises(BudgetError, match=r"disk is short by [0-9]+[.][0-9] TiB"):
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    with pytest.raises(OSError, match=r"short|room|space") as caught:
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), {**plan, "disk_bytes": "100TiB"})
    assert str(tmp_path) in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(tmp_path.iterdir())


def test_a_device_without_the_room_to_run_a_unit_is_an_error_before_anything_is_allocated() -> None:
    model = nn.Sequential(nn.LayerNorm(2**18, bias=False), nn.LayerNorm(2**18, bias=False))  # which nothing can tile
    with pytest.raises(
        BudgetError, match=r"device_bytes leaves 1.0 MiB for the model, but the unit 'root' takes 2.0 MiB"
    ):
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"device_bytes": "1MiB"})
    unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"device_bytes": "3MiB"})


def test_sums_of_several_backwards_are_counted_and_refused_where_the_host_has_no_room(tmp_path: Path) -> None:
    """With weights, gradients and optimizer all on the host: 14 bytes per parameter, 16 from the second backward on."""
    on_host = dict.fromkeys(("weights", "gradients", "optimizer"), "host")
    batch = torch.randn(2, WIDTH)
    model, optimizer = shard_stack(tmp_path, **on_host, host_bytes=32 * NUMEL)
    free = running.sharded(model).tiers.spare_host_bytes()
    for number, expected in ((1, 0), (2, 2 * NUMEL), (3, 2 * NUMEL)):
        model(batch).float().square().mean().backward()
        for unit in optimizer.engine.units:
            unit.gradient.order_stream()
        taken = free - running.sharded(model).tiers.spare_host_bytes()
        assert taken == pytest.approx(expected, rel=0.01), number

    model, optimizer = shard_stack(tmp_path, **on_host, host_bytes=32 * NUMEL)
    held = running.sharded(model).tiers
    held.budgets["host"] -= held.spare_host_bytes() - NUMEL  # room for half of the sums
    model(batch).float().square().mean().backward()
    model(batch).float().square().mean().backward()
    with pytest.raises(BudgetError, match=r'adding up the gradients of several backwards .* accumulate_dtype="bf16"'):
        optimizer.step()
    optimizer.zero_grad()
    assert len(train(model, optimizer)) == 3  # one backward per step still fits


@pytest.fixture
def own_tiers(tmp_path: Path) -> Iterator[tiers.Tiers]:
    budgets = {"device": None, "host": None, "disk": None}
    paths = (str(tmp_path),)
    made = tiers.Tiers(torch.device("cpu"), budgets=budgets, disk_bytes=2 * MIB, disk_path=paths, num_threads=1)
    yield made
    made.close()


def test_what_is_refused_or_freed_is_not_counted(own_tiers: tiers.Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    bounce, (store,) = own_tiers.pool(1, MIB), own_tiers._stores
    own_tiers.free(own_tiers.allocate("disk", torch.uint8, 2 * MIB, bounce))  # the next ones there are written
    before = own_tiers.use(), own_tiers.planned_host_bytes
    own_tiers.allocate("host", torch.float32, MIB, bounce, unplanned_bytes=2 * MIB).free()  # a sum, which moves away
    assert (own_tiers.use(), own_tiers.planned_host_bytes) == before
    for tier, owner, name, refusal in (
        ("host", arena.host_memory, "host_buffer", BudgetError("no memory")),
        ("disk", ExtentStore, "write", DiskError("no disk")),
    ):
        taken = own_tiers.use(), own_tiers.planned_host_bytes, store.free_bytes
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(type(refusal)):
                own_tiers.allocate(tier, torch.bfloat16, MIB, bounce, unplanned_bytes=MIB)
        assert (own_tiers.use(), own_tiers.planned_host_bytes, store.free_bytes) == taken


def test_what_a_lane_takes_while_checksums_are_counted_is_counted(
    own_tiers: tiers.Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def checksum_bytes(_: ExtentStore) -> int:
        taken.append(own_tiers.arena.allocate(torch.uint8, MIB))  # as another thread may at this moment
        return 100

    before = own_tiers.arena.used_bytes
    monkeypatch.setattr(ExtentStore, "checksum_bytes", property(checksum_bytes))
    store = own_tiers.extend(host_bytes=0, disk_bytes=MIB)
    assert own_tiers.arena.used_bytes == before + MIB + 100
    own_tiers.shrink(host_bytes=0, store=store)
    assert own_tiers.arena.used_bytes == before + 2 * MIB


def test_a_host_budget_too_small_for_the_buffers_says_how_much_they_take(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"host_bytes is 8.0 MiB, but .* buffers take 1\d\.?\d* MiB .* Raise host_bytes to"
    ):
        shard_stack(tmp_path, host_bytes="8MiB")
    model, optimizer = shard_stack(tmp_path, device_bytes="1GiB", host_bytes="8MiB")  # nothing has to be moved
    assert len(train(model, optimizer)) == 3


def test_the_host_has_room_set_aside_for_the_checksums_of_what_may_go_to_disk() -> None:
    """Four bytes for every page of 4096, of the states or of the disk, whichever is less."""
    buffers = budgets.LeasedBuffers(3, budgets.LEAST_PIECE, budgets.LEAST_DEPTH)

    def reserved(disk: int, *, is_checked: bool) -> list[int]:
        plan = unbounded.Plan(disk_checksums=is_checked)
        sizes = (2**30, 2**30, disk)
        seen = budgets.set_aside(sizes, plan, torch.device("cpu"), ring=0, buffers=buffers, may_store=2**32)
        return [seen.host_reserve, *(host for _, host in seen.tighter)]

    plain = reserved(2**40, is_checked=False)
    assert [more - less for more, less in zip(reserved(2**40, is_checked=True), plain, strict=True)] == [2**22] * 4
    assert [more - less for more, less in zip(reserved(2**30, is_checked=True), plain, strict=True)] == [2**20] * 4


def test_a_disk_tier_over_several_paths_may_take_what_the_fullest_has_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free counts for each of two folders on one filesystem."""
    filesystems, free = {"/a": 1, "/b": 1, "/c": 2}, {1: 600, 2: 100}
    stat, usage = (lambda path: SimpleNamespace(st_dev=filesystems[path])), (lambda path: free[filesystems[path]])
    monkeypatch.setattr(budgets, "os", SimpleNamespace(stat=stat))
    monkeypatch.setattr(budgets, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=usage(path))))

    def measured(*paths: str) -> int:
        plan = unbounded.Plan(disk_path=paths, device_bytes=0, host_bytes=0)
        return budgets.measure(plan, torch.device("cpu"), num_sharing=1)[2]

    assert [measured("/a"), measured("/a", "/b"), measured("/a", "/c")] == [570, 570, 190]
