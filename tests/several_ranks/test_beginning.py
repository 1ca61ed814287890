"""What every rank must begin with: the same model, plan, optimizer and buffers. Groups are given back."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import unbounded
from tests import process
from tests.ranks import HANG_SECONDS
from unbounded.ranks import launch
from unbounded.ranks.watchdog import first_meeting, watch
from unbounded.ranks.watchdog.heartbeat import Heartbeat
from unbounded.ranks.watchdog.notices import Notices


class Counted(nn.Module):
    """Buffers of several kinds, of which one is a view with gaps."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((3,), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("mask", torch.tensor([value > 0.5, False]), persistent=False)
        self.register_buffer("gaps", torch.full((4, 2), value, dtype=torch.bfloat16)[:, 0])
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def sharded(
    rank: int,
    plan: Any = "auto",
    lr: float = 0.1,
    kind: str = "SGD",
    width: int = 4,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    mesh: Any = None,
    num_steps: int = 0,
) -> Any:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:first]}, {"params": parameters[first:]}]
    optimizer = getattr(torch.optim, kind)(groups if first else parameters, lr=lr)
    for _ in range(num_steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return unbounded.shard(model, optimizer, plan, mesh=mesh)


def buffers_after(rank: int, world_size: int) -> dict[str, Any]:
    model = Counted(float(rank))
    before = model.scale
    unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.scale is before  # the user's own tensors
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_every_rank_begins_with_the_first_ones_buffers(ranks: Any) -> None:
    first, second = ranks(2, buffers_after)
    assert first == second
    assert first["scale"] == [0.0, 0.0, 0.0]
    assert (first["count"], first["mask"], first["gaps"]) == (0, [False, False], [0.0] * 4)


def differing(rank: int, world_size: int, what: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    given: dict[str, Any] = {
        "plan": {"plan": {"stage": 2 + rank}},
        "model": {"width": 4 + rank},
        "origin": {"device": ["cpu", "meta"][rank]},
        "mesh": {"mesh": [mesh, None][rank]},
        "dtype": {"dtype": [torch.float32, torch.bfloat16][rank]},
        "rate": {"lr": 0.1 * (1 + rank)},
        "kind": {"kind": ["SGD", "AdamW"][rank]},
        "groups": {"first": 2 + rank},
        "states": {"kind": "AdamW", "num_steps": 3 * rank},
        "bad plan": {"plan": {"stage": 3 + 4 * rank}},
    }[what]
    with pytest.raises(unbounded.errors.PlanError) as caught:
        sharded(rank, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plan", "rank 1 has a different plan from rank 0: Plan() instead of Plan(stage=2)"),
        (
            "model",
            "rank 1 has a different model from rank 0: parameter 0.weight (5, 4) torch.float32, trained instead of",
        ),
        (
            "dtype",
            "rank 1 has a different model from rank 0: parameter 0.weight (4, 4) torch.bfloat16, trained instead of",
        ),
        (
            "origin",
            "rank 1 has a different model from rank 0: a model on the meta device instead of a model with values",
        ),
        (
            "mesh",
            "rank 1 has a different mesh from rank 0: none instead of ('data',) of the ranks [0, 1]. Build the same",
        ),
        ("rate", "rank 1 has a different optimizer from rank 0: SGD; lr=0.2"),
        ("kind", "rank 1 has a different optimizer from rank 0: AdamW; lr=0.1"),
        (
            "states",
            "different optimizer state from rank 0: 4 parameters after 12 updates in all instead of none. Build",
        ),
        ("groups", "rank 1 has a different division of parameters into groups from rank 0. Build the same"),
        ("bad plan", "stage is 7, but it must be one of 0, 1, 2, 3"),
    ],
)
def test_ranks_that_were_given_different_things_all_say_so(ranks: Any, what: str, message: str) -> None:
    for error in ranks(2, differing, what):
        assert message in error


def join_twice(rank: int, world_size: int) -> list[int]:
    """Sums over the ranks of two groups, one after the other, from a store that outlives both, as torchrun's does.

    The ranks' nodes have restarted their workers so many times: one was started again itself, and counts from 0.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(rank)}
    before, sums = dict(os.environ), []
    os.environ.update(torchrun, **{key: str(number) for key, number in numbers.items()})
    try:
        for _ in range(2):
            dist.destroy_process_group()
            assert launch.join(torch.device("cpu"))
            told = torch.ones(1)
            dist.all_reduce(told)
            sums.append(int(told))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return sums


def test_the_ranks_of_a_launcher_join_again_after_their_group_was_destroyed(ranks: Any) -> None:
    assert ranks(2, join_twice) == [[2, 2]] * 2


def train_on_own_disks(rank: int, world_size: int, folder: str, name: str) -> tuple[float, list[str]]:
    path = f"{folder}/disk{name or rank}"
    Path(folder, f"disk{rank}").mkdir()
    torch.manual_seed(0)
    plan = {"weights": "disk", "optimizer": "disk", "disk_path": path}
    model, optimizer = sharded(rank, plan)
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.wait()
    return float(loss.detach()), [name for name in process.open_files() if f"/disk{rank}/" in name]


@pytest.mark.parametrize("name", ["", "{rank}", "{local_rank}"])
def test_every_rank_may_have_a_disk_of_its_own(ranks: Any, tmp_path: Path, name: str) -> None:
    (first, left), (second, right) = ranks(2, train_on_own_disks, str(tmp_path), name)
    assert first == second
    assert left
    assert right
    assert sorted(os.listdir(tmp_path)) == ["disk0", "disk1"]


def held_after_models(rank: int, world_size: int, num_models: int) -> list[tuple[int, int]]:
    """Threads (Python's and others) and file descriptors after each of several models."""
    held = []
    for _ in range(num_models):
        model, optimizer = sharded(rank, {"stage": 3})
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.wait()
        del model, optimizer
        gc.collect()
        held.append(process.settled())
    return held


def test_models_one_after_the_other_leave_no_threads_nor_descriptors(ranks: Any) -> None:
    for held in ranks(2, held_after_models, 6):
        threads, descriptors = zip(*held, strict=True)
        # If a model left something, each of them would. A thread that is just ending does not count.
        assert threads[-1] - threads[0] < len(held) - 1, held
        assert descriptors[-1] - descriptors[0] < len(held) - 1, held


def two_at_once(rank: int, world_size: int) -> list[float]:
    """Two models take turns, each with its own lanes; a third takes the place of one that is gone."""
    first, second = sharded(rank, {"stage": 3}), sharded(rank, {"stage": 3})
    losses = []
    for _ in range(3):
        for model, optimizer in (first, second):
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    del first, model, optimizer, loss
    third = sharded(rank, {"stage": 3})
    third[0](torch.ones(1, 4)).sum().backward()
    second[0](torch.ones(1, 4)).sum().backward()
    return losses


def test_two_models_at_once_do_not_meet_in_each_others_collectives(ranks: Any) -> None:
    first, second = ranks(2, two_at_once)
    assert first == second


def new_heartbeats(rank: int, world_size: int) -> int:
    """The heartbeats that a model starts, without any of a process group that has just ended."""
    before = set(threading.enumerate())
    sharded(rank, {"stage": 2})
    return sum(thread.name == "unbounded-heartbeat" for thread in set(threading.enumerate()) - before)


def test_a_job_has_one_heartbeat_and_one_rank_none(ranks: Any) -> None:
    assert ranks(1, new_heartbeats) == [0]
    assert ranks(2, new_heartbeats) == [1, 1]


def come_late(rank: int, world_size: int) -> tuple[str, str]:
    """The first rank comes to its first call only when the other has said that it waits."""
    store, told = dist.distributed_c10d._get_default_store(), []

    def tell(text: str, **_: Any) -> None:
        told.append(text)
        store.set("told", "yes")

    limit = first_meeting.TOLD_AFTER_SECONDS
    first_meeting.TOLD_AFTER_SECONDS, first_meeting.print = 0.01, tell  # type: ignore[attr-defined]
    try:
        if rank == 0:
            store.wait(["told"])
        return first_meeting.name_run(dist.group.WORLD), "".join(told)  # type: ignore[arg-type]
    finally:
        first_meeting.TOLD_AFTER_SECONDS = limit
        del first_meeting.print  # type: ignore[attr-defined]


def test_ranks_that_wait_for_anothers_first_call_say_so(ranks: Any) -> None:
    (name, _), (other, told) = ranks(2, come_late)
    assert name == other
    assert "rank 1 has waited" in told
    assert "for rank 0 to make the first call" in told


def end_before_the_first_call(rank: int, world_size: int) -> str:
    """Rank 2 ends, once both others have come: a rank that comes later still is not to be named as well."""
    if rank == 2:
        arrivals = dist.PrefixStore("unbounded-arrivals", dist.distributed_c10d._get_default_store())
        arrivals.wait(["0/1", "1/1"])
        return ""
    with pytest.raises(unbounded.errors.PeerError) as caught:
        sharded(rank)
    return str(caught.value)


def test_a_rank_that_ends_before_its_first_call_is_named_by_all_others(ranks: Any) -> None:
    told = ranks(3, end_before_the_first_call)
    for message in told[:2]:
        assert "for every rank to make its first call to unbounded, but rank 2 did not" in message


def await_two(rank: int, limit: float) -> str:
    """What a rank of two raises that waits for the other to join the job, alone in its store."""
    launched = launch.Launch("torchrun", rank, 2, rank, None, "node0", 29500)
    waits, launch._JOIN = launch._JOIN, timedelta(seconds=limit)
    try:
        with pytest.raises(unbounded.errors.PlanError) as caught:
            launch._await_all(dist.HashStore(), launched)
    finally:
        launch._JOIN = waits
    return str(caught.value)


def test_a_rank_that_does_not_join_is_named() -> None:
    assert "rank 0 of 2 waited 0 s for rank 1 to make the first call to unbounded" in await_two(0, 0.0)
    assert "rank 1 of 2 waited 0 s for rank 0 to make the first call to unbounded" in await_two(1, 0.0)


WITHOUT_A_STORE = """
import os, sys
from datetime import timedelta
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
import torch
from unbounded.ranks import launch
launch.TOLD_AFTER_SECONDS = 0.0
launch._JOIN = timedelta(seconds=float(sys.argv[2]))
launch.join(torch.device("cpu"))
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_rank_whose_store_nobody_holds_says_so_and_can_be_interrupted(is_interrupted: bool) -> None:
    with socket.socket() as held:  # bound, so that nobody else gets the port, but nobody listens
        held.bind(("127.0.0.1", 0))
        port, limit = held.getsockname()[1], 600 if is_interrupted else 0
        command = [sys.executable, "-c", WITHOUT_A_STORE, str(port), str(limit)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in process.stderr or ():
            lines.append(line)
            if is_interrupted and "has tried for" in line:
                process.send_signal(signal.SIGINT)
        process.wait(HANG_SECONDS)
    if is_interrupted:
        assert f"rank 1 has tried for 0 s to reach the job's store at 127.0.0.1:{port}, which rank 0" in lines[0]
        assert lines[-1].strip() == "KeyboardInterrupt"
    else:
        assert f"PlanError: rank 1 of 2 could not connect to its peers at 127.0.0.1:{port} in 0 s: " in lines[-1]
        assert "frame #" not in "".join(lines)


class Lasting(Heartbeat):
    """One whose group is gone from torch, as after `destroy_process_group`, while it is still in the store."""

    def _is_current(self) -> bool:
        return True


def test_a_program_ends_the_heartbeats_of_groups_that_it_destroyed() -> None:
    group: set[int] = set()  # anything: no watch knows of it
    heartbeat = Lasting(group, Notices(dist.HashStore(), "run", 0, 1))  # type: ignore[arg-type]
    watch._say_farewell()  # at exit: a thread inside torch would then abort the process
    heartbeat._thread.join(60)
    assert not heartbeat.is_alive()
