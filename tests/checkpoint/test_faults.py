"""What can go wrong while saving: the checkpoint before is always whole, and nothing torn is taken for one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unbounded
from tests import ranks as pool
from tests.checkpoint.jobs import build, train, whole
from unbounded.checkpoint import folder as folders
from unbounded.checkpoint import job, saving, stream
from unbounded.checkpoint.manifest import read_manifest
from unbounded.errors import CheckpointError, DiskError

PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]


class Marked(nn.Module):
    """Every weight of one save has the same value, so a mix of two saves shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))


def marked(number: int) -> Any:
    model = Marked()
    model, optimizer = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mark(model, number)
    return model, optimizer


def mark(model: nn.Module, number: int) -> None:
    with unbounded.full_params(model):
        for parameter in model.parameters():
            parameter.fill_(number)


def read_mark(folder: Path) -> int:
    """The number that everything in the checkpoint agrees on; every byte verified."""
    manifest = read_manifest(folders.find(folder))
    values = {float(v) for tensor in whole(folders.find(folder)).values() for v in tensor.unique()}
    number = manifest.values["extra"]["0"]["number"]
    assert values == {float(number)}
    return int(number)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(pool.PRELOAD))
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def save_for_ever(rank: int, world_size: int, folder: str, first: int, store: str) -> None:
    """Saves one number after another until killed; says when the first save begins."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    model, optimizer = marked(first)
    for number in range(first, first + 10_000):
        mark(model, number)
        Path(f"{store}.ready{rank}").touch()
        unbounded.save(folder, model, optimizer, number=number)


def kill_at_random(folder: Path, world_size: int, times: int, seed: int, *, all_ranks: bool) -> list[int]:
    """Kills saving jobs one after another, within about three saves; the numbers found in the folder after each."""
    generator, found = random.Random(seed), []
    began = time.monotonic()
    unbounded.save(folder, *marked(0), number=0)
    longest = 3 * (time.monotonic() - began) + 0.1
    for attempt in range(times):
        store = folder.parent / f"store{world_size}{attempt}"
        jobs = [
            start(save_for_ever, rank, world_size, str(folder), attempt * 10_000 + 1, str(store))
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + 60
        while not Path(f"{store}.ready0").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, longest))
        for child in jobs if all_ranks else [generator.choice(jobs)]:
            child.kill()
        for child in jobs:
            child.join(30)
            assert not child.is_alive(), "a rank hangs after another was killed"
        found.append(read_mark(folder))
    return found


def test_a_job_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    unbounded.save(folder, *marked(0), number=0)
    found = kill_at_random(folder, 1, 32, seed=1, all_ranks=True)
    assert found == sorted(found)
    assert len(set(found)) > 5  # saves did come to an end in between
    unbounded.save(folder, *marked(7), number=7)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".c")] == []


def test_one_rank_killed_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    unbounded.save(folder, *marked(0), number=0)
    found = kill_at_random(folder, 2, 18, seed=2, all_ranks=False)
    assert found == sorted(found)


MOMENTS = ["claimed", "data written", "manifest written", "moved aside", "in place", "released"]


def die_at(folder: str, moment: str, exchange: bool) -> None:
    """Saves number 1, and is killed at a moment of the commit."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = marked(1)
    if not exchange:
        folders._exchange = lambda one, other: False
    rename = os.rename
    if moment == "claimed":
        job.SaveJob._write_file = die
    elif moment == "data written":
        job.SaveJob._commit = die
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
    child.join(60)
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
    write, commit = stream.Writer._write, folders.Claim.commit

    def full(*_: Any) -> Any:
        error = DiskError("write failed: No space left on device (errno 28). Free space on that disk.")
        error.errno = errno.ENOSPC
        raise error

    if moment == "write" and rank == failing:
        stream.Writer._write = full
    elif moment == "manifest" and rank == 0:
        folders.Claim.commit = full
    try:
        with pytest.raises(Exception, match="No space left") as caught:
            unbounded.save(folder, model, optimizer, number=1)
    finally:
        stream.Writer._write, folders.Claim.commit = write, commit
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
        subprocess.run(["umount", small], check=True)


def test_an_error_in_the_background_is_raised_by_wait_or_by_the_next_save(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer = marked(1)
    with monkeypatch.context() as patch:
        patch.setattr(stream.Writer, "write", lambda *_: (_ for _ in ()).throw(DiskError("gone")))
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


def test_a_program_that_ends_finishes_its_save_and_tells_of_an_error(tmp_path: Path) -> None:
    script = (
        "import sys, torch, unbounded\n"
        "from torch import nn\n"
        "from unbounded.checkpoint import stream\n"
        "def job():\n"
        "    model = nn.Linear(300, 300)\n"
        "    return unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "good, bad = job(), job()\n"
        "write = stream.Writer.write\n"
        "stream.Writer.write = lambda *a: 1 / 0 if '/.d.' in a[0].file.path else write(*a)\n"
        "unbounded.save(sys.argv[1] + '/c', *good, wait=False)\n"
        "unbounded.save(sys.argv[1] + '/d', *bad, wait=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert whole(tmp_path / "c")
    assert done.stderr.splitlines()[-1] == "unbounded: a save in the background failed: division by zero"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# -- two jobs ----------------------------------------------------------------------------------------------------------


def save_many(folder: str, first: int, results: Any) -> None:
    model, optimizer = marked(first)
    saved, refused = [], []
    for number in range(first, first + 25):
        mark(model, number)
        try:
            unbounded.save(folder, model, optimizer, number=number)
            saved.append(number)
        except CheckpointError as error:
            refused.append(str(error))
    results.put((saved, refused))


def test_of_two_jobs_saving_to_one_folder_one_wins_cleanly(tmp_path: Path) -> None:
    results = multiprocessing.get_context("forkserver").Queue()
    jobs = [start(save_many, str(tmp_path / "c"), first, results) for first in (1, 1001)]
    outcomes = [results.get(timeout=60) for _ in jobs]
    for child in jobs:
        child.join(30)
    saved = [number for numbers, _ in outcomes for number in numbers]
    assert read_mark(tmp_path / "c") in saved
    assert all("another job is saving" in text for _, refused in outcomes for text in refused)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_that_is_being_saved_to_is_refused_until_it_is_free(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    held = folders.claim(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"another job is saving to .*/c now"):
        unbounded.save(tmp_path / "c", model, optimizer, number=1)
    unbounded.save(tmp_path / "d", model, optimizer, number=1)
    held.release()
    unbounded.save(tmp_path / "c", model, optimizer, number=1)
    assert read_mark(tmp_path / "c") == 1


# -- folders -----------------------------------------------------------------------------------------------------------


def test_files_of_the_users_are_never_replaced(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    (tmp_path / "c").mkdir()
    unbounded.save(tmp_path / "c", model, optimizer, number=1)  # an empty folder is fine
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds files that are not a checkpoint's: notes\.txt"):
        unbounded.save(tmp_path / "c", model, optimizer, number=2)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        unbounded.save(tmp_path / "file", model, optimizer, number=2)
    assert read_mark(tmp_path / "c") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_is_followed_and_parents_are_made(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    (tmp_path / "latest").symlink_to(tmp_path / "deep" / "real")
    unbounded.save(tmp_path / "latest", model, optimizer, number=1)
    assert (tmp_path / "latest").is_symlink()
    assert read_mark(tmp_path / "deep" / "real") == read_mark(tmp_path / "latest") == 1


def test_extra_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\['loader'\] is a .*object"):
        unbounded.save(tmp_path / "c", *marked(1), loader=object())
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    (model, _), (_, other) = marked(1), marked(2)
    for wrong in (other, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)):
        with pytest.raises(unbounded.StateError, match="not the optimizer that shard returned"):
            unbounded.save(tmp_path / "c", model, wrong)
    with pytest.raises(unbounded.StateError, match="not sharded"):
        unbounded.save(tmp_path / "c", Marked())
