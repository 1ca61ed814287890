"""What can go wrong while saving: the checkpoint before is always whole, and nothing torn is taken for one."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unbounded
from tests import process
from tests.checkpoint.jobs import build, train, whole
from tests.checkpoint.marks import mark, marked, read_mark, start
from tests.ranks import HANG_SECONDS
from unbounded.checkpoint import saving
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format.parsing import read_manifest
from unbounded.checkpoint.save import readers, save_job, writer
from unbounded.errors import DiskError, UnboundedError

# Of jobs that save; `python -m tests.faults` asks for more.
KILLS = int(os.environ.get("UNBOUNDED_KILLS", "8"))
PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]


def save_for_ever(rank: int, world_size: int, folder: str, first: int, store: str, saves: int) -> None:
    """Saves one number after another until it is killed; says when the first save begins, or the next after `saves`."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    model, optimizer = marked(first)
    for number in range(first, first + 10_000):
        mark(model, number)
        if number >= first + saves:
            Path(f"{store}.ready{rank}").touch()
        unbounded.save(folder, model, optimizer, number=number)


def kill_at_random(folder: Path, world_size: int, times: int, seed: int, *, all_ranks: bool) -> list[int]:
    """Kills jobs that save, each within about three saves; returns the number found in the folder after each.

    Every other one has saved once by then; all that have several ranks, whose first save makes their group.
    """
    generator, found = random.Random(seed), []
    began = time.monotonic()
    unbounded.save(folder, *marked(0), number=0)
    longest = 3 * (time.monotonic() - began) + 0.1
    for attempt in range(times):
        store, saves = folder.parent / f"store{world_size}{attempt}", attempt % 2 if world_size == 1 else 1
        jobs = [
            start(save_for_ever, rank, world_size, str(folder), attempt * 10_000 + 1, str(store), saves)
            for rank in range(world_size)
        ]
        assert process.eventually(Path(f"{store}.ready0").exists, 0.002)
        time.sleep(generator.uniform(0, longest))
        for child in jobs if all_ranks else [generator.choice(jobs)]:
            child.kill()
        for child in jobs:
            child.join(HANG_SECONDS)
            assert not child.is_alive(), "a rank hangs after another was killed"
        found.append(read_mark(folder))
    return found


def test_a_job_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    unbounded.save(folder, *marked(0), number=0)
    found = kill_at_random(folder, 1, KILLS, seed=1, all_ranks=True)
    assert found == sorted(found)
    assert len(set(found)) > 2  # some saves did finish in between
    unbounded.save(folder, *marked(7), number=7)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".c")] == []


def test_one_rank_killed_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    unbounded.save(folder, *marked(0), number=0)
    found = kill_at_random(folder, 2, KILLS // 2, seed=2, all_ranks=False)
    assert found == sorted(found)


MOMENTS = ["claimed", "data written", "manifest written", "moved aside", "in place", "released"]


def die_at(folder: str, moment: str, exchange: bool) -> None:
    """Saves number 1, and is killed at a given moment of the commit."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = marked(1)
    if not exchange:
        folders._exchange = lambda one, other: False
    rename = os.rename
    if moment == "claimed":
        save_job.SaveJob._write_file = die
    elif moment == "data written":
        save_job.SaveJob._commit = die
    elif moment == "manifest written":
        folders.Claim._put_in_place = die
    elif moment == "moved aside":
        os.rename = lambda *a: (rename(*a), die())
    elif moment == "in place":
        folders.Claim.release = die
    unbounded.save(folder, model, optimizer, number=1)
    die()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_every_step_of_the_commit_a_kill_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, moment: str, exchange: bool
) -> None:
    if moment == "moved aside" and exchange:
        pytest.skip("an exchange has no moment in between")
    unbounded.save(tmp_path / "c", *marked(0), number=0)
    child = start(die_at, str(tmp_path / "c"), moment, exchange)
    child.join(HANG_SECONDS)
    assert child.exitcode == -signal.SIGKILL
    expected = 1 if moment in ("in place", "released") else 0
    assert read_mark(tmp_path / "c") == expected
    model, optimizer = marked(5)
    assert unbounded.load(tmp_path / "c", model, optimizer) == {"number": expected}
    unbounded.save(tmp_path / "c", model, optimizer, number=expected)  # what was left is cleaned up
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert read_mark(tmp_path / "c") == expected


def test_saving_works_where_folders_cannot_be_exchanged(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    for number in (1, 2):
        unbounded.save(tmp_path / "c", *marked(number), number=number)
        assert read_mark(tmp_path / "c") == number
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# -- errors ------------------------------------------------------------------------------------------------------------


def fail_in_rank(rank: int, world_size: int, folder: str, failing: int, moment: str) -> tuple[str, str, list[str]]:
    """Saves 0; then a save in which one rank fails; what is left."""
    model, optimizer = build({})
    train(model, optimizer, 0, 1, rank)
    unbounded.save(folder, model, optimizer, number=0)
    train(model, optimizer, 1, 2, rank)
    write, commit = writer.Writer.work, folders.Claim.commit

    def full(*_: Any) -> Any:
        error = DiskError("write failed: No space left on device (errno 28). Free space on that disk.")
        error.errno = errno.ENOSPC
        raise error

    if moment == "write" and rank == failing:
        writer.Writer.work = full
    elif moment == "manifest" and rank == 0:
        folders.Claim.commit = full
    try:
        with pytest.raises(Exception, match="No space left") as caught:
            unbounded.save(folder, model, optimizer, number=1)
    finally:
        writer.Writer.work, folders.Claim.commit = write, commit
    left = sorted(path.name for path in Path(folder).parent.iterdir())
    if world_size > 1:
        dist.barrier()
    unbounded.load(folder, model, optimizer)
    train(model, optimizer, 1, 2, rank)
    return type(caught.value).__name__, str(caught.value), left


@pytest.mark.parametrize(("world_size", "failing", "moment"), [(1, 0, "write"), (2, 1, "write"), (2, 0, "manifest")])
def test_a_disk_that_runs_full_fails_all_ranks_and_leaves_the_old_checkpoint_alone(
    ranks: Any, tmp_path: Path, world_size: int, failing: int, moment: str
) -> None:
    results = ranks(world_size, fail_in_rank, str(tmp_path / "c"), failing, moment)
    for rank, (kind, message, left) in enumerate(results):
        assert kind == "DiskError"
        assert (f"rank {failing} failed" in message) == (rank != failing)
        if rank == 0:
            assert left == ["c"]
    assert read_manifest(tmp_path / "c").values["extra"]["0"] == {"number": 0}
    whole(tmp_path / "c")


def fill(folder: Path, model: nn.Module, optimizer: Any) -> None:
    for number in range(2, 9):
        unbounded.save(folder / f"e{number}", model, optimizer, number=number)


def test_a_real_full_filesystem_is_told_with_what_is_short(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", small]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model, optimizer = marked(1)
        unbounded.save(small / "c", model, optimizer, number=1)
        with pytest.raises(DiskError, match=r"cannot hold .* short|No space left") as caught:
            fill(small, model, optimizer)
        assert caught.value.errno == errno.ENOSPC
        assert not [path for path in small.iterdir() if path.name.startswith(".")]
        assert read_mark(small / "c") == 1
    finally:
        subprocess.run(["umount", "-l", small], check=True)  # also where a child that was forked has a file open


def test_an_error_in_the_background_is_raised_by_wait_or_by_the_next_save(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer = marked(1)
    with monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "write", lambda *_: (_ for _ in ()).throw(DiskError("gone")))
        handle = unbounded.save(tmp_path / "c", model, optimizer, wait=False)
        with pytest.raises(DiskError, match="gone"):
            handle.wait()
        unbounded.save(tmp_path / "d", model, optimizer, wait=False)
        while not saving._pending[model].done():
            time.sleep(0.001)
    with pytest.raises(DiskError, match="gone"):
        unbounded.save(tmp_path / "d", model, optimizer)
    unbounded.save(tmp_path / "d", model, optimizer, number=1)
    assert read_mark(tmp_path / "d") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("name", ["unbounded-save", "unbounded-copy", "of a pool"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_in_the_background_that_has_no_thread_is_made_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(save_job.SaveJob, "_copies_ahead", lambda self: self.copy)  # as with a GPU
    model, optimizer = build({"weights": "disk", "optimizer": "disk"})  # which cannot be copied out of an update's way
    limit = process.ThreadLimit(monkeypatch, name)

    def refuse_pool(num_threads: int) -> None:
        limit.num_refused += 1
        raise UnboundedError("no threads")

    if name == "of a pool":
        monkeypatch.setattr(readers.kernels, "Pool", refuse_pool)
    handle = unbounded.save(tmp_path / "c", model, optimizer, wait=False)
    train(model, optimizer, 0, 1, 0)
    handle.wait()
    assert limit.num_refused == 1
    assert whole(tmp_path / "c")
    unbounded.save(tmp_path / "c", model, optimizer)  # nothing is left of the first one


def test_a_program_that_ends_finishes_its_save_and_exits_with_an_error_if_that_failed(tmp_path: Path) -> None:
    script = (
        "import atexit, sys, torch\n"
        'atexit.register(print, "a handler of somebody else\'s")\n'
        "import unbounded\n"
        "from torch import nn\n"
        "from unbounded.checkpoint.save import writer\n"
        "def job():\n"
        "    model = nn.Linear(300, 300)\n"
        "    return unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "good = job()\n"
        "write = writer.Writer.write\n"
        "writer.Writer.write = lambda *a: 1 / 0 if '/.d.' in a[0].file.path else write(*a)\n"
        "unbounded.save(sys.argv[1] + '/c', *good, wait=False)\n"
        "unbounded.save(sys.argv[1] + '/d', *job(), wait=False)  # the model is gone before its save has failed\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert whole(tmp_path / "c")
    assert done.stderr.splitlines()[-1] == "unbounded: a save in the background failed: division by zero"
    assert done.stdout == "a handler of somebody else's\n"
    assert done.returncode == 120
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
