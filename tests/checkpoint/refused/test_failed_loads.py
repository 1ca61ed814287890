"""Loads that cannot work: the same error on all ranks, nothing half-loaded is used, and there is a way to go on."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.checkpoint.jobs import Odd, assert_same, build, train, whole
from unbounded.checkpoint import loading
from unbounded.checkpoint.format import data_files, folder, parsing
from unbounded.checkpoint.format.data_files import Files
from unbounded.errors import CheckpointError, DiskError, StateError
from unbounded.native.disk.extents import ExtentStore
from unbounded.native.disk.handle import disk_error

PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]
ON_DISK = {"weights": "disk", "optimizer": "disk", "gradients": "disk"}


def meet(world_size: int) -> None:
    if world_size > 1:
        torch.distributed.barrier()


@contextmanager
def failing_writes(first: int, code: int) -> Iterator[list[int]]:
    """From number `first` on, writes to the disk tier fail. Gives the count."""
    real, seen = ExtentStore.write, [0]

    def write(self: Any, *arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] >= first:
            raise disk_error(code, f"write of an extent failed: {os.strerror(code)} (errno {code})", "/swap")
        return real(self, *arguments)

    ExtentStore.write = write  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ExtentStore.write = real  # type: ignore[method-assign]


def texts_of(*actions: Any) -> list[str]:
    """What each of them raises."""
    found = []
    for action in actions:
        with pytest.raises((CheckpointError, StateError, DiskError)) as caught:
            action()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


# -- a load that fails after it has begun to change the model ----------------------------------------------------------


def train_past_a_save(rank: int, world_size: int, root: str) -> tuple[torch.nn.Module, Any, list[float]]:
    """A model with states on disk that was saved after one step, and the losses of the two steps after that."""
    model, optimizer = build({**ON_DISK, "disk_path": f"{root}/swap"})
    train(model, optimizer, 0, 1, rank)
    unbounded.save(f"{root}/c", model, optimizer)
    expected = train(model, optimizer, 1, 3, rank)
    optimizer.wait()
    meet(world_size)
    return model, optimizer, expected


def fail_install(rank: int, world_size: int, root: str, fault: tuple[int, int]) -> tuple[list[str], bool]:
    """A staged load into states on disk fails on one rank; then what the model still does."""
    model, optimizer, expected = train_past_a_save(rank, world_size, root)
    with failing_writes(fault[0] if rank == world_size - 1 else 10**9, fault[1]) as seen:
        messages = texts_of(lambda: unbounded.load(f"{root}/c", model, optimizer))
    assert rank < world_size - 1 or seen[0] >= fault[0]
    messages += texts_of(
        lambda: train(model, optimizer, 1, 2, rank), lambda: unbounded.save(f"{root}/d", model, optimizer)
    )
    unbounded.load(f"{root}/c", model, optimizer)
    return messages, train(model, optimizer, 1, 3, rank) == expected


@pytest.mark.parametrize(("world_size", "first"), [(1, 1), (1, 4), (2, 3)])
def test_a_staged_load_that_fails_while_it_is_put_in_place_marks_the_model(
    ranks: Any, tmp_path: Path, world_size: int, first: int
) -> None:
    (tmp_path / "swap").mkdir()
    for messages, resumed in ranks(world_size, fail_install, str(tmp_path), (first, errno.ENOSPC)):
        assert "No space left" in messages[0]
        assert messages[0].startswith("DiskError")
        assert all("a load failed after it had begun to change the model" in text for text in messages[1:])
        assert resumed
    assert not (tmp_path / "d").exists()


def test_an_error_in_the_last_act_of_a_load_marks_the_model_too(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer = build({})
    unbounded.save(tmp_path / "c", model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(loading._Loading, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            unbounded.load(tmp_path / "c", model, optimizer)
    with pytest.raises(StateError, match="a load failed after it had begun to change the model"):
        train(model, optimizer, 0, 1, 0)
    unbounded.load(tmp_path / "c", model, optimizer)
    train(model, optimizer, 0, 1, 0)


def lose_a_gradient(rank: int, world_size: int, root: str) -> tuple[list[str], bool]:
    """A write of a gradient fails on one rank; then the last checkpoint is loaded, and nothing else is done."""
    model, optimizer, expected = train_past_a_save(rank, world_size, root)
    with failing_writes(1 if rank == world_size - 1 else 10**9, errno.EIO):
        messages = texts_of(lambda: (train(model, optimizer, 3, 4, rank), optimizer.wait()))
    unbounded.load(f"{root}/c", model, optimizer)
    return messages, train(model, optimizer, 1, 3, rank) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_gradient_was_lost_a_load_goes_on(ranks: Any, tmp_path: Path, world_size: int) -> None:
    (tmp_path / "swap").mkdir()
    for messages, resumed in ranks(world_size, lose_a_gradient, str(tmp_path)):
        assert "Input/output error" in messages[0]
        assert resumed


# -- one answer on all ranks -------------------------------------------------------------------------------------------


def load_nothing(rank: int, world_size: int, root: str) -> list[tuple[str, str]]:
    model, optimizer = build({})
    unbounded.save(f"{root}/torn", model, optimizer)
    meet(world_size)
    if rank == 0:
        os.unlink(f"{root}/torn/manifest.json")
        os.mkdir(f"{root}/empty")
    meet(world_size)
    found = []
    for name in ("torn", "empty", "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            unbounded.load(f"{root}/{name}", model, optimizer)
        found.append((type(caught.value).__name__, str(caught.value)))
    train(model, optimizer, 0, 1, rank)
    return found


def test_where_there_is_no_checkpoint_all_ranks_get_the_same_file_not_found_error(ranks: Any, tmp_path: Path) -> None:
    one, other = ranks(2, load_nothing, str(tmp_path))
    assert one == other
    assert all(kind == "MissingCheckpointError" and "there is no whole checkpoint" in text for kind, text in one)


def fail_at(rank: int, world_size: int, root: str, moment: str) -> tuple[str, int | None, str, str]:
    """A system call fails on the first rank, in saving or in loading."""
    model, optimizer = build({})
    unbounded.save(f"{root}/c", model, optimizer)
    meet(world_size)
    real = os.fsync, parsing.os.stat, folder.sync_folder

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if rank == 0 and moment == "manifest synced":
        folder.os.fsync = fail
    elif rank == 0 and moment == "folder synced":
        folder.sync_folder = lambda path: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO), str(path)))
    elif rank == 0 and moment == "manifest read":
        parsing.os = _Os(lambda path: fail() if str(path).endswith("manifest.json") else os.stat(path))
    elif rank == 0:
        data_files.os = _Os(lambda path: fail() if str(path).endswith(".bin") else os.stat(path))
    action = unbounded.save if moment.endswith("synced") else unbounded.load
    try:
        with pytest.raises(Exception, match="Input/output error") as caught:
            action(f"{root}/c", model, optimizer)
    finally:
        os.fsync, folder.sync_folder, parsing.os, data_files.os = real[0], real[2], os, os
    error: Any = caught.value
    unbounded.load(f"{root}/c", model, optimizer)
    return type(error).__name__, error.errno, str(error.filename), str(error)


class _Os:
    """The module `os` with another `stat`."""

    def __init__(self, stat: Any) -> None:
        self.stat = stat

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize("moment", ["manifest synced", "folder synced", "manifest read", "data looked at"])
def test_errors_of_the_system_come_with_path_and_errno_on_all_ranks(ranks: Any, tmp_path: Path, moment: str) -> None:
    told = ranks(2, fail_at, str(tmp_path), moment)
    assert [kind for kind, *_ in told] == ["DiskError", "DiskError"]
    assert [code for _, code, *_ in told] == [errno.EIO, errno.EIO]
    assert told[0][2] == told[1][2]
    assert told[0][2].startswith(str(tmp_path))
    assert "(errno 5)" in told[0][3]
    assert told[1][3] == f"rank 0 failed: {told[0][3]}"


# -- another optimizer -------------------------------------------------------------------------------------------------

MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def make(optimizer: str) -> Any:
    torch.manual_seed(1)
    model = Odd()
    return unbounded.shard(model, MAKE[optimizer]([p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize(
    ("saved", "here", "named"),
    [
        ("adam", "adamw", ["it was saved from Adam, but the optimizer here is AdamW"]),
        ("adamw", "sgd", ["saved from AdamW, but the optimizer here is SGD", "it has exp_avg, which the optimizer"]),
        ("amsgrad", "adamw", ["it has max_exp_avg_sq, which", "amsgrad is False here and True in the checkpoint"]),
        ("adamw", "amsgrad", ["it has no max_exp_avg_sq of", "amsgrad is True here and False in the checkpoint"]),
        ("momentum", "sgd", ["it has momentum_buffer, which", "momentum is 0 here and 0.9 in the checkpoint"]),
        ("sgd", "momentum", ["it has no momentum_buffer of"]),
    ],
)
def test_another_optimizer_is_refused_with_what_differs(
    tmp_path: Path, saved: str, here: str, named: list[str]
) -> None:
    model, optimizer = make(saved)
    train(model, optimizer, 0, 1, 0)
    unbounded.save(tmp_path / "c", model, optimizer)
    model, optimizer = make(here)
    unbounded.save(tmp_path / "before", model, optimizer)
    options = [dict(group, params=None) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        unbounded.load(tmp_path / "c", model, optimizer)
    for text in named:
        assert text in str(caught.value)
    assert [dict(group, params=None) for group in optimizer.param_groups] == options
    unbounded.save(tmp_path / "after", model, optimizer)
    assert_same(whole(tmp_path / "after"), whole(tmp_path / "before"))
    unbounded.load(tmp_path / "c", model)  # weights alone load whatever the optimizer is


def test_factored_states_of_another_dtype_are_refused_as_such(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        linear = torch.nn.Linear(3, 2, dtype=dtype)
        model, optimizer = unbounded.shard(linear, torch.optim.Adafactor(linear.parameters()))
        if dtype == torch.float32:
            unbounded.save(tmp_path / "c", model, optimizer)
    told = r"the factored states of weight, bias are torch\.float64 here and torch\.float32 in the checkpoint"
    with pytest.raises(CheckpointError, match=told) as caught:
        unbounded.load(tmp_path / "c", model, optimizer)
    assert "it has no" not in str(caught.value)


# -- a checkpoint that is replaced meanwhile ---------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [256 << 20, 0], ids=["staged", "in place"])
@pytest.mark.parametrize("moment", ["open", "prepare", "read"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: Any, moment: str, staged: int
) -> None:
    from unbounded.checkpoint.load.opened import OpenedCheckpoint

    monkeypatch.setattr(loading, "STAGED_BYTES", staged)
    saver, saver_optimizer = build({})
    unbounded.save(tmp_path / "c", saver, saver_optimizer, number=1)
    shutil.copytree(tmp_path / "c", tmp_path / "1")
    train(saver, saver_optimizer, 0, 1, 0)
    model, optimizer = build({}, seed=9)
    owner, name = (Files, "read") if moment == "read" else (OpenedCheckpoint, moment)
    real, replaced = getattr(owner, name), threading.Event()

    def replace(self: Any, *arguments: Any) -> Any:
        result = None if moment == "read" else real(self, *arguments)
        if not replaced.is_set():
            replaced.set()
            unbounded.save(tmp_path / "c", saver, saver_optimizer, number=2)
        return real(self, *arguments) if moment == "read" else result

    monkeypatch.setattr(owner, name, replace)
    number = unbounded.load(tmp_path / "c", model, optimizer)["number"]
    assert number == (1 if moment == "prepare" else 2)  # after `prepare` all files of the old one are open
    monkeypatch.undo()
    unbounded.save(tmp_path / "d", model, optimizer)
    assert_same(whole(tmp_path / "d"), whole(tmp_path / "c" if number == 2 else tmp_path / "1"))


def test_a_damaged_checkpoint_is_not_read_again_and_again(tmp_path: Path, monkeypatch: Any) -> None:
    from unbounded.checkpoint.load.opened import OpenedCheckpoint

    model, optimizer = build({})
    unbounded.save(tmp_path / "c", model, optimizer)
    shutil.copyfile("/dev/null", tmp_path / "c" / "data-00000.bin")
    real, opened = OpenedCheckpoint.open, []
    monkeypatch.setattr(OpenedCheckpoint, "open", lambda self: (opened.append(1), real(self))[1])
    with pytest.raises(CheckpointError, match="has 0 bytes instead of"):
        unbounded.load(tmp_path / "c", model, optimizer)
    assert len(opened) == 1
