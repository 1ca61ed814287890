"""Whose folder it is: names of any kind, locks, two jobs, what killed saves leave, and users' files."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.marks import Marked, mark, marked, read_mark, start
from tests.ranks import HANG_SECONDS
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format import leftovers
from unbounded.cli import main
from unbounded.errors import CheckpointError, DiskError

# -- what saves that were killed have left -----------------------------------------------------------------------------


def leave(folder: Path, what: str = "saving", *, note: str | None = None) -> Path:
    """What a save into `folder` leaves when it is killed: a staging folder, and its lock with the machine in it."""
    left = folder.parent / f".{folder.name}.{what}-{secrets.token_hex(6)}"
    left.mkdir()
    (left / "data-00000.bin").write_bytes(b"x" * 5000)
    (folder.parent / f".{folder.name}.lock").write_text(os.uname().nodename if note is None else note)
    return left


def test_names_with_any_characters_touch_only_their_own(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    names = ["run[1]", "run*", "run?", "[!r]un", "run", "run1", "a b", "é", ".hidden", "run.saving-0123456789ab"]
    held = [folders.claim(tmp_path / name) for name in names]
    for claim in held:
        claim.staging.joinpath("data-00000.bin").write_bytes(b"alive")
    unbounded.save(tmp_path / "other[*]?", model, optimizer, number=1)
    for claim in held:
        assert claim.staging.joinpath("data-00000.bin").read_bytes() == b"alive", claim.folder
        claim.release()
    for number, name in enumerate(names):
        mark(model, number)
        unbounded.save(tmp_path / name, model, optimizer, number=number)
    assert [read_mark(tmp_path / name) for name in names] == list(range(len(names)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "other[*]?"])


def test_what_killed_saves_left_under_other_names_is_removed_by_any_save_beside_them(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    unbounded.save(tmp_path / "step-1", model, optimizer, number=1)
    shutil.copytree(tmp_path / "step-1", tmp_path / ".step-3.old-0123456789ab")
    leave(tmp_path / "step-1"), leave(tmp_path / "step-2"), leave(tmp_path / "step-2")
    leave(tmp_path / "step-3")
    alive = folders.claim(tmp_path / "step-9")
    unbounded.save(tmp_path / "step-4", model, optimizer, number=1)
    assert alive.staging.is_dir()
    alive.release()
    # A replacement of step-3 was cut short between its two renames: what it replaced is back.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]
    assert read_mark(tmp_path / "step-3") == 1


def test_what_another_machine_left_is_kept_for_a_day(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    there, nobody = leave(tmp_path / "there", note="another-machine"), leave(tmp_path / "nobody", note="")
    (tmp_path / ".nobody.lock").unlink()
    unbounded.save(tmp_path / "c", model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([there.name, nobody.name, ".there.lock", "c"])
    before = time.time() - leftovers.ABANDONED_SECONDS - 1
    for left in (there, nobody):
        for path in (left / "data-00000.bin", left):
            os.utime(path, (before, before))
    unbounded.save(tmp_path / "c", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_without_locks_saves_are_made_and_what_others_leave_is_kept_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)  # Lustre, where it is mounted without them
    model, optimizer = marked(1)
    left = [leave(tmp_path / name) for name in ("c", "d")]
    for number in (1, 2):
        mark(model, number)
        unbounded.save(tmp_path / "c", model, optimizer, number=number)
        assert read_mark(tmp_path / "c") == number
    assert all(folder.is_dir() for folder in left)
    for path in (path for folder in left for path in (*folder.iterdir(), folder)):
        os.utime(path, (time.time() - 2 * leftovers.ABANDONED_SECONDS,) * 2)
    unbounded.save(tmp_path / "c", model, optimizer, number=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_that_runs_out_of_descriptors_gives_its_lock_back(tmp_path: Path) -> None:
    child = start(run_out_of_descriptors, tmp_path)  # in which no other thread opens or closes a file
    child.join(HANG_SECONDS)
    assert child.exitcode == 0  # its traceback is in the output otherwise


def run_out_of_descriptors(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    unbounded.save(tmp_path / "c", model, optimizer, number=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = fill_descriptors()
    codes = []
    try:
        for spare in range(8):
            leave(tmp_path / "other")
            resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + spare, before[1]))
            codes.append(claim_and_release(tmp_path / "c"))
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert os.dup(0) == fillers[-1] + 1, f"a descriptor is still open after {spare} were free"
            os.close(fillers[-1] + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)
    assert set(codes) == {errno.EMFILE, None}
    assert codes[0] == errno.EMFILE
    unbounded.save(tmp_path / "c", model, optimizer, number=1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def fill_descriptors() -> list[int]:
    """Takes every free descriptor up to the highest that is in use."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] <= highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    return fillers


def claim_and_release(folder: Path) -> int | None:
    try:
        folders.claim(folder).release()
    except DiskError as error:
        return error.errno
    return None


# -- two jobs ----------------------------------------------------------------------------------------------------------


def save_many(folder: str, first: int, results: Any) -> None:
    model, optimizer = marked(first)
    saved, refused = [], []
    for number in range(first, first + 8):
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
    outcomes = [results.get(timeout=HANG_SECONDS) for _ in jobs]
    for child in jobs:
        child.join(HANG_SECONDS)
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
    with pytest.raises(CheckpointError, match=r"holds files that do not belong to a checkpoint: notes\.txt"):
        unbounded.save(tmp_path / "c", model, optimizer, number=2)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        unbounded.save(tmp_path / "file", model, optimizer, number=2)
    with pytest.raises(CheckpointError, match="is a mount point, and saving replaces the whole folder"):
        unbounded.save("/proc", model, optimizer, number=2)
    assert read_mark(tmp_path / "c") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_is_followed_and_parents_are_made(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    (tmp_path / "latest").symlink_to(tmp_path / "deep" / "real")
    unbounded.save(tmp_path / "latest", model, optimizer, number=1)
    assert (tmp_path / "latest").is_symlink()
    assert read_mark(tmp_path / "deep" / "real") == read_mark(tmp_path / "latest") == 1


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unbounded.save(tmp_path / "c[/1]", *marked(1), number=1)
    assert main(["inspect", str(tmp_path / "c[/1]")]) == 0
    assert "c[/1]" in "".join(capsys.readouterr().out.split())


def test_extra_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = marked(1)
    with pytest.raises(CheckpointError, match=r"extra\['loader'\] is a .*object"):
        unbounded.save(tmp_path / "c", model, optimizer, loader=object())
    weight = next(model.parameters())
    for held in (weight, weight.detach()):
        with pytest.raises(CheckpointError, match=r"extra\['anchor'\] is a .* Save .*\.detach\(\)\.clone\(\)"):
            unbounded.save(tmp_path / "c", model, optimizer, anchor=held)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    (model, _), (_, other) = marked(1), marked(2)
    for wrong in (other, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)):
        with pytest.raises(unbounded.StateError, match="not the optimizer that shard returned"):
            unbounded.save(tmp_path / "c", model, wrong)
    with pytest.raises(unbounded.StateError, match="not sharded"):
        unbounded.save(tmp_path / "c", Marked())
