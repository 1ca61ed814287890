"""Boards of other tools get the numbers that metrics.jsonl has; what is missing is named before any work is done."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import process
from tests.ranks import HANG_SECONDS
from tests.train.corpora import write_texts
from tests.train.jobs import losses, tiny, train
from tests.train.test_job import Killed, train_until
from unbounded.errors import PlanError


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"without {package}")


@needs("tensorboard")
def test_tensorboard_reads_back_what_a_resumed_run_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(
        tmp_path / "out", write_texts(tmp_path / "a.jsonl", 200), report_to=("tensorboard",), checkpoint_every=2
    )
    with pytest.raises(Killed):
        train_until(config, step=4)
    train(config)
    board = EventAccumulator(str(tmp_path / "out"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"step/loss", "step/lr", "step/grad_norm", "step/epoch", "step/seconds", "step/memory/host"} <= set(tags)
    events = {event.step: event.value for event in board.Scalars("step/loss")}
    assert [*events] == [1, 2, 3, 4, 5, 6]
    assert [*events.values()] == pytest.approx(losses(tmp_path / "out"), rel=1e-6)


@needs("wandb")
def test_an_offline_run_of_wandb_holds_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(HANG_SECONDS))  # wandb gives up on a busy machine otherwise
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", str(HANG_SECONDS))
    config = tiny(tmp_path / "out", write_texts(tmp_path / "a.jsonl", 200), report_to=("wandb",), steps=3)
    train(config)
    (path,) = (tmp_path / "out").rglob("*.wandb")
    wanted = [*enumerate(losses(tmp_path / "out"), start=1)]
    process.eventually(lambda: read_losses(path) == wanted)  # wandb writes it in another process
    assert read_losses(path) == wanted


def read_losses(path: Path) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in read_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "step/loss" in items:
            found.append((int(items["train_step"]), float(items["step/loss"])))
    return found


def read_log(content: bytes) -> Iterator[bytes]:
    """The records of wandb's file: after 7 bytes, LevelDB's log format (blocks of 32 KiB; crc, length and type)."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece of one
            yield whole
            whole = b""


class FakeRun:
    """Stands for what `wandb.init` returns, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.calls.append((name, arguments or options))


def test_wandb_is_called_with_the_settings_the_steps_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, module = FakeRun(), ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    begun: list[dict[str, Any]] = []
    module.init = lambda **options: (begun.append(options), run)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    train(tiny(tmp_path / "out", write_texts(tmp_path / "a.jsonl", 200), report_to=("wandb",), steps=2))
    assert (begun[0]["dir"], begun[0]["config"]["steps"], begun[0]["resume"]) == (str(tmp_path / "out"), 2, "allow")
    assert [name for name, _ in run.calls] == ["define_metric", "define_metric", "log", "log", "finish"]
    logged = [values[0] for name, values in run.calls if name == "log"]
    assert [(line["train_step"], line["step/loss"]) for line in logged] == [
        *enumerate(losses(tmp_path / "out"), start=1)
    ]


def test_a_board_that_is_not_installed_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbounded.observe.boards.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"--report-to wandb needs the package .* pip install wandb\."):
        train(tiny(tmp_path / "out", write_texts(tmp_path / "a.jsonl", 20), report_to=("wandb",)))
    assert not (tmp_path / "out").exists()
