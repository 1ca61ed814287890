"""The output folder: torn checkpoints, runs that start over, other runs, and files that are not ours."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.corpora import write_texts
from tests.train.jobs import losses, tiny, train, train_on_rank
from tests.train.test_job import Killed, train_until
from unbounded.errors import DiskError, InputError, PlanError
from unbounded.train.step.loop import Trainer

PRELOAD_IN_RANKS = ["unbounded.train.training", "unbounded.sharding.placing"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl", 300)


def tear(output: Path, step: int) -> None:
    """Leaves a checkpoint folder as a save that is killed half way would leave it without staging: no manifest."""
    (output / f"step-{step:08}").mkdir()
    (output / f"step-{step:08}" / "data-00000.bin").write_bytes(b"half")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_torn_newest_checkpoint_is_passed_over_alike_on_any_number_of_ranks(
    tmp_path: Path, texts: Path, ranks: Callable[..., list[Any]], world_size: int
) -> None:
    config = tiny(tmp_path / "out", texts, steps=2, keep_last=3)
    train(config)
    tear(tmp_path / "out", 9)
    assert ranks(world_size, train_on_rank, replace(config, steps=4)) == [4] * world_size
    assert len(losses(tmp_path / "out")) == 4


@pytest.mark.parametrize("killed_at", [3, 5])  # before its first checkpoint, and right after it was saved
def test_a_run_begun_anew_over_a_longer_one_is_never_taken_for_it(tmp_path: Path, texts: Path, killed_at: int) -> None:
    config = tiny(tmp_path / "out", texts, steps=8, seed=1)
    train(config)
    anew = replace(config, seed=2, checkpoint_every=4, resume="never")
    with pytest.raises(Killed):
        train_until(anew, step=killed_at)
    resumed = train(replace(anew, resume="auto"))
    assert resumed.step == 8
    train(replace(anew, output=str(tmp_path / "whole")))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert not list((tmp_path / "out").glob("replaced-*"))


def test_a_finished_run_says_so_and_what_to_do(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path / "out", texts, steps=2)
    train(config)
    capsys.readouterr()
    assert train(config).step == 2
    said = capsys.readouterr().out
    assert 'this run is finished: "' in said
    assert "Raise --steps to continue, or start over with --resume never" in said


def test_another_runs_folder_is_refused_with_what_differs(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, steps=1)
    train(config)
    with pytest.raises(InputError, match=r'holds another run: its optimizer is "adamw", not "sgd"\. Choose another'):
        train(replace(config, optimizer="sgd"))


def test_a_folder_that_another_process_trains_into_is_refused_until_it_has_ended(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, steps=1)
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="is in use: another process trains into it"):
        train(config)
    assert not list((tmp_path / "out").iterdir())
    os.close(other)
    assert [train(replace(config, steps=steps)).step for steps in (1, 2)] == [1, 2]  # each gives it back


def test_an_output_that_is_no_folder_or_holds_somebody_elses_metrics_is_refused(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    for name in ("file", "fifo"):
        with pytest.raises(InputError, match="is not a folder"):
            train(tiny(tmp_path / name, texts))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(InputError, match="is not our metrics file"):
        train(tiny(tmp_path / "theirs", texts))
    assert (tmp_path / "theirs" / "metrics.jsonl").read_text() == '{"loss": 1}\n'
    with pytest.raises(InputError, match="cannot be made"):
        train(tiny(tmp_path / "file" / "below", texts))


@pytest.mark.parametrize("content", ['{"name": "mine"}', "notes", "[]", None], ids=["JSON", "text", "list", "FIFO"])
def test_somebody_elses_run_file_is_not_replaced(tmp_path: Path, texts: Path, content: str | None) -> None:
    path = tmp_path / "out" / "run.json"
    path.parent.mkdir()
    path.write_text(content) if content else os.mkfifo(path)
    for resume in ("auto", "never"):
        with pytest.raises(InputError, match=r'run\.json" is not our file, and would be replaced\. Choose another'):
            train(tiny(tmp_path / "out", texts, resume=resume))
    assert content is None or path.read_text() == content


def test_a_run_file_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "out", texts, steps=1)
    train(config)

    def read_text(path: Path, *args: Any) -> str:
        if path.name == "run.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args)

    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(InputError, match=r'run\.json" cannot be read: Permission denied\. Choose another --output\.'):
        train(replace(config, steps=2))


def test_a_trace_replaces_a_trace_and_nothing_else(tmp_path: Path, texts: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file.json").write_text('{"mine": 1}')
    refused = {"fifo": "a FIFO", "file.json": "was not written by unbounded", ".": "a folder"}
    if os.geteuid() == 0:  # as root a rename would replace the device
        os.mknod(tmp_path / "device", 0o020600, os.makedev(1, 3))
        refused["device"] = "a device"
    for name, why in refused.items():
        with pytest.raises(PlanError, match=why):
            train(tiny(tmp_path / "out", texts, steps=1, trace=str(tmp_path / name)))
    assert (tmp_path / "file.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "out").exists()  # refused before anything is made
    for _ in range(2):
        train(tiny(tmp_path / "out", texts, steps=1, trace=str(tmp_path / "t.json"), resume="never"))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_last_save_that_fails_in_the_background_fails_the_run(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbounded.checkpoint.save import save_job as saving

    def fail(self: Any) -> None:
        raise DiskError(f"saving to {self.folder} failed: Input/output error (errno 5).")

    monkeypatch.setattr(saving.SaveJob, "finish", fail)
    with pytest.raises(DiskError, match=r"Input/output error \(errno 5\)\. There is no checkpoint yet\."):
        train(tiny(tmp_path / "out", texts, steps=1))
    shutil.rmtree(tmp_path / "out")


def test_a_resumed_run_computes_with_the_threads_that_it_began_with(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    seed = Trainer._seed
    monkeypatch.setattr(Trainer, "_seed", lambda self, n: (used.append(torch.get_num_threads()), seed(self, n))[1])
    before = torch.get_num_threads()
    config = tiny(tmp_path / "out", texts, steps=1, threads=2)
    train(config)
    train(replace(config, steps=2, threads=None))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    train(replace(config, steps=3, threads=None))
    train(replace(config, steps=1, threads=None, resume="never"))
    assert used == [2, 2, 2, 3]
    assert torch.get_num_threads() == before


def test_a_folder_for_states_that_cannot_hold_them_is_refused_before_anything_is_built(
    tmp_path: Path, texts: Path
) -> None:
    (tmp_path / "file").touch()
    for name, message in (("file", "is not a folder"), ("nowhere", "does not exist")):
        with pytest.raises(InputError, match=rf'disk path ".*{name}" {message}'):
            train(tiny(tmp_path / "out", texts, disk_path=(str(tmp_path / name),)))
    assert not (tmp_path / "out").exists()
