"""A disk that fails in a step: the step fails with path and errno, nothing hangs, and checkpoints are unharmed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests import process
from tests.ranks import HANG_SECONDS
from tests.warm import warm_python
from tests.zero.training import Batch, TinyGPT, shard
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.parsing import read_manifest
from unbounded.errors import DiskError
from unbounded.native.disk.extents import ExtentStore
from unbounded.native.disk.handle import disk_error
from unbounded.sharding.running import sharded
from unbounded.zero.step.update_pass import Piece

ON_DISK = dict.fromkeys(("weights", "gradients", "optimizer"), "disk")


class FailedTransfer:
    """A transfer that has failed, for whoever waits for it."""

    def __init__(self, operation: str, code: int, path: str) -> None:
        self._error = (code, f"{operation} of an extent failed at {path}: {os.strerror(code)} (errno {code})", path)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        raise disk_error(*self._error)


@contextmanager
def failing_after(operation: str, calls: int, code: int) -> Iterator[list[int]]:
    """From the given call on, every transfer of the kind fails. Gives the count of calls."""
    real, seen = getattr(ExtentStore, operation), [0]

    def transfer(store: ExtentStore, *arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] > calls:
            return FailedTransfer(operation, code, str(store.folders[0]))
        return real(store, *arguments)

    setattr(ExtentStore, operation, transfer)
    try:
        yield seen
    finally:
        setattr(ExtentStore, operation, real)


def make(folder: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = TinyGPT()
    return shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {**ON_DISK, "disk_path": folder})


def train(model: nn.Module, optimizer: Any, rank: int, first: int, steps: int, *, wait: bool = True) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model.loss(Batch(step, 0, rank).tokens())  # type: ignore[operator]
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if wait:
        optimizer.wait()
    return losses


def describe(error: BaseException) -> dict[str, Any]:
    """What a caller can learn from an error, without the frames that hold the model."""
    known = isinstance(error, DiskError)
    return {
        "type": type(error).__name__,
        "text": str(error),
        "errno": error.errno if known else None,  # type: ignore[attr-defined]
        "path": error.filename if known else None,  # type: ignore[attr-defined]
    }


def break_in_step(
    rank: int, world_size: int, store: str, checkpoint: str, fault: tuple[str, int, int]
) -> dict[str, Any]:
    """Trains, saves, and goes on with a disk that fails on the last rank; returns what every rank then raised."""
    operation, calls, code = fault
    model, optimizer = make(store)
    train(model, optimizer, rank, 0, 1)
    unbounded.save(checkpoint, model, optimizer, losses=train(model, optimizer, rank, 1, 1))
    fails = rank == world_size - 1
    with failing_after(operation, calls if fails else sys.maxsize, code):
        try:
            train(model, optimizer, rank, 2, 3)
        except Exception as error:
            return describe(error)
    return {"type": None}


def close_in_step(rank: int, world_size: int, store: str) -> dict[str, Any]:
    model, optimizer = make(store)
    train(model, optimizer, rank, 0, 1)
    loss = model.loss(Batch(1, 0, rank).tokens())  # type: ignore[operator]
    sharded(model).tiers.close()
    try:
        loss.backward()
        optimizer.step()
        optimizer.wait()
    except Exception as error:
        return describe(error)
    return {"type": None}


def resume(rank: int, world_size: int, store: str, checkpoint: str) -> tuple[list[float], list[float]]:
    """The steps after the checkpoint, from it and from the start: what a job without the fault would have done."""
    model, optimizer = make(store)
    train(model, optimizer, rank, 0, 2)
    expected = train(model, optimizer, rank, 2, 2)
    model, optimizer = make(store)
    unbounded.load(checkpoint, model, optimizer)
    return train(model, optimizer, rank, 2, 2), expected


def verify(checkpoint: Path) -> None:
    folder = folders.find(checkpoint)
    with Files(folder, read_manifest(folder)) as files:
        files.check_present()
        files.verify_all()


FAULTS = [
    ("read", 0, errno.EIO),  # the first fetch of the forward
    ("read", 17, errno.EIO),  # in the backward
    ("read", 60, errno.EIO),  # states and gradients of an update
    ("write", 0, errno.ENOSPC),  # the first gradient
    ("write", 12, errno.EIO),  # an update's new states
    ("write", 40, errno.EIO),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_a_failing_disk_fails_the_step_on_all_ranks_with_path_and_errno_and_leaves_the_checkpoint_whole(
    ranks: Any, tmp_path: Path, fault: tuple[str, int, int], world_size: int
) -> None:
    store, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    store.mkdir()
    met = ranks(world_size, break_in_step, str(store), str(checkpoint), fault)
    for rank, error in enumerate(met):
        assert (error["type"], error["errno"], error["path"]) == ("DiskError", fault[2], str(store)), met
        assert f"errno {fault[2]}" in error["text"]
        assert error["text"].startswith(f"rank {world_size - 1} failed: ") == (rank < world_size - 1)
    verify(checkpoint)
    for resumed, expected in ranks(world_size, resume, str(store), str(checkpoint)):
        assert resumed == expected
    assert not list(store.iterdir())


def drop_after_failure(rank: int, world_size: int, store: str, fault: tuple[str, int, int]) -> bool:
    """Whether a model whose disk failed is freed when its user drops it and the error."""
    operation, calls, code = fault
    model, optimizer = make(store)
    alive = [weakref.ref(model), weakref.ref(optimizer.engine)]
    train(model, optimizer, rank, 0, 1)
    with failing_after(operation, calls, code), pytest.raises(DiskError) as raised:
        train(model, optimizer, rank, 1, 3)
    del model, optimizer, raised
    return process.is_freed(*alive)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_a_model_whose_disk_failed_is_freed(tmp_path: Path, fault: tuple[str, int, int]) -> None:
    assert drop_after_failure(0, 1, str(tmp_path), fault)


def meet_a_failure(rank: int, world_size: int, store: str, stage: int, where: str) -> list[str]:
    """What every rank raises when the last one's disk fails; all go on when it works again."""
    torch.manual_seed(3)
    model = TinyGPT()
    plan = {**ON_DISK, "weights": "disk" if stage == 3 else "device", "stage": stage, "disk_path": store}
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)
    train(model, optimizer, rank, 0, 2)

    def accumulate() -> None:
        """The first gradient is lost, the second lands."""
        with failing_after("write", 0 if rank == world_size - 1 else sys.maxsize, errno.EIO):
            model.loss(Batch(2, 0, rank).tokens()).backward()  # type: ignore[operator]
            for unit in optimizer.engine.units:
                unit.gradient.adding and unit.gradient.adding.settle()
        model.loss(Batch(2, 1, rank).tokens()).backward()  # type: ignore[operator]
        optimizer.step()

    def update() -> None:
        train(model, optimizer, rank, 2, 1, wait=False)
        model.loss(Batch(3, 0, rank).tokens())  # type: ignore[operator]

    def read_values() -> None:
        with unbounded.full_params(model):
            pass

    acts = {
        "evaluation": lambda: torch.no_grad()(model.loss)(Batch(2, 0, rank).tokens()),  # type: ignore[arg-type]
        "state dict": model.state_dict,
        "full params": read_values,
        "accumulation": accumulate,
        "update": update,
    }
    met = []
    try:
        with failing_after("read", 0 if rank == world_size - 1 and where != "accumulation" else sys.maxsize, errno.EIO):
            acts[where]()
    except DiskError as error:
        met.append(str(error))
    optimizer.zero_grad()
    if where != "update":
        train(model, optimizer, rank, 2, 1)
    return met


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("where", "stage"),
    [
        *((where, 3) for where in ("evaluation", "state dict", "full params", "accumulation", "update")),
        *((where, 2) for where in ("accumulation", "update")),  # whose weights are on the device
        ("update", 1),
    ],
)
def test_what_one_rank_cannot_read_or_write_no_rank_takes_for_done(
    ranks: Any, tmp_path: Path, where: str, stage: int
) -> None:
    first, last = ranks(2, meet_a_failure, str(tmp_path), stage, where)
    assert len(first) == len(last) == 1
    assert first[0] == f"rank 1 failed: {last[0]}"


def test_a_read_straight_into_a_units_memory_that_fails_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """Memory that happens to begin on a page is read without a bounce buffer, and that read is waited for too."""
    model, optimizer = make(str(tmp_path))
    train(model, optimizer, 0, 0, 1)
    monkeypatch.setattr("unbounded.tiers.array.is_reachable", lambda tensor: True)
    with failing_after("read", 0, errno.EIO), pytest.raises(DiskError, match="read of an extent failed"):
        model.loss(Batch(1, 0, 0).tokens())  # type: ignore[operator]


def lose_the_last_write(rank: int, world_size: int, folder: str) -> tuple[list[str], bool]:
    """All units have new weights, but a state of the last unit was not written: what step, wait and save say."""
    torch.manual_seed(3)
    model = TinyGPT()
    plan = {"weights": "host", "gradients": "host", "optimizer": "disk", "disk_path": folder}
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)
    with failing_after("write", sys.maxsize, errno.EIO) as writes:
        train(model, optimizer, rank, 0, 1)
    unbounded.save(f"{folder}/saved", model, optimizer)
    expected = train(model, optimizer, rank, 1, 2)
    unbounded.load(f"{folder}/saved", model, optimizer)
    with failing_after("write", writes[0] - 1 if rank == world_size - 1 else sys.maxsize, errno.EIO):
        train(model, optimizer, rank, 1, 1, wait=False)
        for unit in optimizer.engine.units:
            unit.states_written.settle()
    met = []
    for act in (
        optimizer.wait,
        lambda: unbounded.save(f"{folder}/worse", model, optimizer),
        lambda: train(model, optimizer, rank, 2, 1),
    ):
        with pytest.raises(DiskError) as caught:
            act()
        met.append(str(caught.value))
    optimizer.zero_grad()
    unbounded.load(f"{folder}/saved", model, optimizer)
    return met, train(model, optimizer, rank, 1, 2) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_was_not_written_fails_whatever_comes_next_until_a_load(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    for met, resumed in ranks(world_size, lose_the_last_write, str(tmp_path)):
        assert all("write of an extent failed" in text for text in met)
        assert resumed


@pytest.mark.parametrize(("operation", "calls"), [("read", 0), ("read", 5), ("write", 0), ("write", 4)])
def test_an_update_that_fails_gives_back_all_its_buffers(tmp_path: Path, operation: str, calls: int) -> None:
    model, optimizer = make(str(tmp_path))
    model.loss(Batch(0, 0, 0).tokens()).backward()  # type: ignore[operator]
    for unit in optimizer.engine.units:
        unit.gradient.order_stream()
    with failing_after(operation, calls, errno.EIO):
        optimizer.step()
        with pytest.raises(DiskError):
            optimizer.wait()
    for update_pass in optimizer.updates._passes.values():
        pool = update_pass.bounce
        assert pool._made > 0
        assert len(pool._free) == pool._made


class LateTransfer:
    """A transfer that lands in its buffer long after it was asked for."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._thread = buffer, threading.Thread(target=self._land)
        self._thread.start()

    def _land(self) -> None:
        time.sleep(0.2)
        self._buffer.fill_(7)

    def wait(self) -> None:
        self._thread.join()


def test_buffers_go_back_when_the_last_transfer_is_over_and_not_when_the_first_has_failed(tmp_path: Path) -> None:
    _, optimizer = make(str(tmp_path))
    (update_pass, *_) = optimizer.updates._passes.values()
    pool = update_pass.bounce
    lease = pool.lease()
    buffer = lease.tensor(torch.uint8, 16)
    piece = Piece(optimizer.engine.units[0], None, 1.0, 0, 16, [])  # type: ignore[arg-type]
    piece.leases.append(lease)
    piece.waits += [FailedTransfer("read", errno.EIO, "here"), LateTransfer(buffer)]
    with pytest.raises(DiskError):
        update_pass._finish(piece)
    assert buffer.tolist() == [7] * 16
    assert len(pool._free) == pool._made


def test_a_read_that_failed_once_is_tried_again(tmp_path: Path) -> None:
    model, optimizer = make(str(tmp_path))
    train(model, optimizer, 0, 0, 1)
    tokens = Batch(9, 0, 0).tokens()
    with torch.no_grad():
        expected = model.loss(tokens)  # type: ignore[operator]
        with failing_after("read", 3, errno.EIO), pytest.raises(DiskError):
            model.loss(tokens)  # type: ignore[operator]
        assert torch.equal(model.loss(tokens), expected)  # type: ignore[operator]
    assert optimizer.memory()["device"].used_bytes == 0
    reference, other = make(str(tmp_path))
    assert train(reference, other, 0, 0, 3)[1:] == train(model, optimizer, 0, 1, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_store_closed_in_a_step_fails_it_on_every_rank(ranks: Any, tmp_path: Path, world_size: int) -> None:
    for met in ranks(world_size, close_in_step, str(tmp_path)):
        assert (met["type"], met["errno"], met["path"]) == ("DiskError", errno.EBADF, str(tmp_path))
        assert "used after it was closed" in met["text"]


def test_a_folder_removed_in_a_step_changes_nothing(tmp_path: Path) -> None:
    """The disk tier's files have no names: they stay as long as the process has them open."""
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    losses = []
    for folder in (kept, removed):
        folder.mkdir()
        model, optimizer = make(str(folder))
        losses.append(train(model, optimizer, 0, 0, 1))
        if folder is removed:
            shutil.rmtree(folder)
        losses[-1] += train(model, optimizer, 0, 1, 2)
    assert losses[0] == losses[1]


CHILD = """
import sys
from tests.tiers import test_disk_faults_in_a_step as case
model, optimizer = case.make(sys.argv[1])
case.train(model, optimizer, 0, 0, 2)
print("trained", flush=True)
if sys.argv[2] == "wait":
    case.train(model, optimizer, 0, 2, 10**9)
"""


@pytest.mark.parametrize("end", ["exits", "wait"], ids=["at-its-end", "killed"])
def test_the_disk_tier_leaves_nothing_behind(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [warm_python(), "-c", CHILD, str(tmp_path), end]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        if end == "wait":
            process.kill()
        assert process.wait(HANG_SECONDS) == (-signal.SIGKILL if end == "wait" else 0)
    assert not list(tmp_path.iterdir())
