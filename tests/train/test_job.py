"""The training job: repeats and resumes exactly, is the same on any number of ranks, and ends as it should."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.train.corpora import sentences, write_jsonl, write_texts
from tests.train.jobs import losses, tiny, train, train_on_rank
from unbounded.activations.promise import DeviceShortage
from unbounded.errors import DataError, InputError, TrainingError
from unbounded.observe import trace
from unbounded.observe.metrics import Metrics, read_metrics
from unbounded.observe.replacing import write_file
from unbounded.train.data.document import Split
from unbounded.train.job.guard import name_shortage
from unbounded.train.job.summary import describe_summary
from unbounded.train.step import loop

PRELOAD_IN_RANKS = ["unbounded.train.training", "unbounded.sharding.placing"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl", 600)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Conversations whose answers differ in length, so that ranks see different numbers of targets."""
    said = sentences(300)
    turns = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(said, said[7:], strict=False)
    ]
    return write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages} for messages in turns])


SAMPLE = "the \udcc3\udcbc "  # as a locale without UTF-8 gives the argument "the ü "


def test_the_loss_falls_and_everything_is_written_down(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, steps=12, eval_fraction=0.05, eval_every=4, sample_tokens=8, sample=SAMPLE)
    summary = train(config)
    found = losses(tmp_path / "out")
    assert len(found) == 12
    assert found[-1] < found[0] - 0.5
    evaluations = read_metrics(tmp_path / "out" / "metrics.jsonl", "eval")
    assert [line["step"] for line in evaluations] == [4, 8, 12]
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))
    assert (summary.step, summary.last_loss, summary.signal) == (12, found[-1], None)
    assert summary.sample.startswith("the ü ")
    assert summary.checkpoint == tmp_path / "out" / "step-00000012"
    assert summary.tiers["host"].used_bytes > 0
    assert summary.tiers["disk"].used_bytes > 0
    assert summary.lanes["disk read"].bytes > 0


def test_two_runs_with_one_seed_give_identical_losses_and_another_seed_others(tmp_path: Path, texts: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tiny(tmp_path / name, texts, seed=seed))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_accumulating_small_parts_gives_the_loss_of_the_whole_batch(tmp_path: Path, chats: Path) -> None:
    train(tiny(tmp_path / "whole", chats, micro_batch=8))
    train(tiny(tmp_path / "parts", chats, micro_batch=1))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_what_happens_to_activations_changes_no_loss(tmp_path: Path, texts: Path) -> None:
    found = {}
    for policy in ("keep", "recompute", "host"):
        summary = train(tiny(tmp_path / policy, texts, activations=policy))
        found[policy] = summary.tiers["host"].activation_bytes
        assert losses(tmp_path / policy) == losses(tmp_path / "keep")
        assert ("64.0 KiB of it activations" in "\n".join(describe_summary(summary))) == (policy == "host")
    assert found == {"keep": 0, "recompute": 0, "host": 2 * 8 * 32 * 32 * 4}  # blocks, rows, length, width, fp32


def test_activations_beyond_the_hosts_budget_end_the_run_with_what_would_help(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, host_bytes="20MiB", sequence_length=512, batch_tokens=2**16, micro_batch=128)
    with pytest.raises(TrainingError, match=r"activations need 8.0 MiB more host memory, but of 20.0 MiB they"):
        train(config)


def test_the_same_global_batch_gives_the_same_losses_on_any_number_of_ranks(
    tmp_path: Path, ranks: Callable[..., list[Any]], chats: Path
) -> None:
    found = {}
    for world_size in (1, 2, 4):
        output = tmp_path / str(world_size)
        steps = ranks(world_size, train_on_rank, tiny(output, chats, eval_fraction=0.05, eval_every=3))
        assert steps == [6] * world_size
        found[world_size] = losses(output) + [line["loss"] for line in read_metrics(output / "metrics.jsonl", "eval")]
    assert found[2] == pytest.approx(found[1], rel=2e-5)
    assert found[4] == pytest.approx(found[1], rel=2e-5)


def test_a_run_that_was_stopped_goes_on_with_the_losses_of_one_that_was_not(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "whole", texts, steps=9, checkpoint_every=4)
    train(config)
    stopped = replace(config, output=str(tmp_path / "stopped"))
    with pytest.raises(Killed):
        train_until(stopped, step=6)
    assert train(stopped).step == 9
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, texts: Path, ranks: Callable[..., list[Any]]) -> None:
    config = tiny(tmp_path / "whole", texts, steps=8, checkpoint_every=4)
    train(config)
    moved = replace(config, output=str(tmp_path / "moved"))
    with pytest.raises(Killed):
        train_until(moved, step=5)
    ranks(2, train_on_rank, moved)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=2e-5)


@contextmanager
def handled_by(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, texts: Path, number: signal.Signals
) -> None:
    config = tiny(tmp_path / "whole", texts, steps=7)
    train(config)
    stopped = replace(config, output=str(tmp_path / "stopped"))
    with handled_by(number, signal.SIG_DFL):
        summary = train_until(stopped, step=3, act=lambda: os.kill(os.getpid(), number))
        assert signal.getsignal(number) == signal.SIG_DFL
    assert (summary.signal, summary.step) == (number, 3)
    assert summary.checkpoint == tmp_path / "stopped" / "step-00000003"
    train(stopped)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_signal_that_the_run_was_started_to_ignore_stays_ignored(tmp_path: Path, texts: Path) -> None:
    with handled_by(signal.SIGHUP, signal.SIG_IGN):  # as by nohup
        summary = train_until(tiny(tmp_path / "out", texts), step=2, act=lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert (summary.signal, summary.step) == (None, 6)


def test_only_the_last_checkpoints_are_kept(tmp_path: Path, texts: Path) -> None:
    train(tiny(tmp_path / "out", texts, checkpoint_every=1, keep_last=2))
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ["step-00000005", "step-00000006"]


def test_a_run_that_begins_anew_drops_the_old_checkpoints_once_it_has_its_own(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, keep_last=1)
    train(config)
    first = losses(tmp_path / "out")
    train(replace(config, steps=3, resume="never"))
    assert losses(tmp_path / "out") == pytest.approx(first[:3], abs=1.0)
    assert [path.name for path in (tmp_path / "out").glob("step-*")] == ["step-00000003"]


def test_resuming_what_is_not_there_is_refused(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint in"):
        train(tiny(tmp_path / "out", texts, resume="must"))


def test_resuming_with_other_data_is_refused_unless_it_may_begin_anew(tmp_path: Path, texts: Path) -> None:
    config = tiny(tmp_path / "out", texts, steps=3)
    train(config)
    other = replace(config, data=(str(write_texts(tmp_path / "other.jsonl", 300)),), steps=5)
    with pytest.raises(DataError, match="--restart-data"):
        train(other)
    assert train(replace(other, restart_data=True)).step == 5


def test_the_learning_rate_warms_up_and_falls_also_across_a_resumption(tmp_path: Path, texts: Path) -> None:
    config = tiny(
        tmp_path / "out", texts, steps=10, warmup=2, lr=1e-2, final_lr=1e-3, decay="linear", checkpoint_every=3
    )
    with pytest.raises(Killed):
        train_until(config, step=7)
    train(config)
    rates = [line["lr"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    expected = [1e-2 * (0.1 + 0.9 * (1 - done / 8)) for done in range(8)]
    assert rates == pytest.approx([5e-3, 1e-2, *expected])


def test_a_first_step_with_nothing_to_predict_ends_the_run(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y"}]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat}] * 3)
    with pytest.raises(DataError, match="the 256 tokens of the first step have nothing to predict"):
        train(tiny(tmp_path / "out", data))


def test_a_loss_that_is_not_finite_stops_the_run_naming_step_module_and_checkpoint(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "out", texts, checkpoint_every=2)
    _break_module(monkeypatch, step=4, name="blocks.1.feed_in")
    with pytest.raises(TrainingError, match=r'step 4: the loss is not finite .*"blocks\.1\.feed_in".*step-00000002'):
        train(config)


def test_a_gradient_that_is_not_finite_stops_the_run_naming_its_unit(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_gradient(trainer: Any) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.nan)

        return trainer.model.get_submodule("blocks.0.feed_out").register_forward_hook(hook)

    _break_step(monkeypatch, 4, break_gradient)
    with pytest.raises(TrainingError, match=r'step 4: the gradient is not finite \(loss [0-9.]+, .*unit "blocks\.0"'):
        train(tiny(tmp_path / "out", texts))


def test_a_loss_that_is_not_finite_is_passed_over_where_that_is_the_policy(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_module(monkeypatch, step=4, name="blocks.1.feed_in")
    assert train(tiny(tmp_path / "out", texts, on_nan="skip")).step == 6
    found = losses(tmp_path / "out")
    assert [math.isfinite(loss) for loss in found] == [True, True, True, False, True, True]
    assert "step 4: the loss is not finite" in capsys.readouterr().out


def test_a_run_on_text_that_is_not_utf_8_begins_by_saying_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.txt").write_bytes("Grüße ".encode("latin-1") * 300)
    train(tiny(tmp_path / "run", tmp_path / "old.txt", steps=1))
    said = 'old.txt" is not all UTF-8: 600 bytes are read as replacement characters.'
    assert capsys.readouterr().out.count(said) == 1


def test_a_full_disk_is_reported_with_the_last_checkpoint(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = unbounded.save

    def fill_up(folder: Path, *args: Any, **extra: Any) -> Any:
        if extra["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return save(folder, *args, **extra)

    monkeypatch.setattr(unbounded, "save", fill_up)
    with pytest.raises(TrainingError, match=r'the disk is full: .*step-00000004.*last checkpoint is ".*step-00000002"'):
        train(tiny(tmp_path / "out", texts, checkpoint_every=2))


def test_metrics_that_find_no_space_end_the_run_with_their_file_and_the_last_checkpoint(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Metrics.write

    def fill_up(metrics: Metrics, kind: str, step: int, **values: Any) -> None:
        if step == 4:
            metrics._file = open("/dev/full", "w")  # noqa: SIM115 (closed with the metrics)
        write(metrics, kind, step, **values)

    monkeypatch.setattr(Metrics, "write", fill_up)
    message = r'the disk is full: .*No space left.*metrics\.jsonl.*last checkpoint is ".*step-00000002"'
    with pytest.raises(TrainingError, match=message):
        train(tiny(tmp_path / "out", texts, checkpoint_every=2))


def test_a_file_that_finds_no_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(path: Path, text: str, encoding: str) -> None:
        with open("/dev/full", "w") as full:
            full.write(text)

    monkeypatch.setattr(Path, "write_text", fill_up)
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.json'"):
        write_file(tmp_path / "run.json", "{}")


def test_a_trace_has_the_first_steps_in_their_lanes(tmp_path: Path, texts: Path) -> None:
    summary = train(tiny(tmp_path / "out", texts, trace=str(tmp_path / "t.json"), trace_steps=2))
    assert summary.trace == tmp_path / "t.json"
    spans = [event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    # forward through the blocks and back, for each of the two steps
    assert [span["name"] for span in spans if span["cat"] == "compute"] == [
        "blocks.0",
        "blocks.1",
        "blocks.1",
        "blocks.0",
    ] * 2
    assert {"disk read", "disk write", "host optimizer"} <= {span["cat"] for span in spans}


@pytest.mark.parametrize("trace_steps", [2, 100], ids=["during the run", "at its end"])
def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, texts: Path, trace_steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_up(path: Path, *args: Any, **details: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(trace, "write", fill_up)
    job = tiny(tmp_path / "out", texts, trace=str(tmp_path / "t.json"), trace_steps=trace_steps)
    summary = train(job)
    assert summary.trace is None
    assert summary.checkpoint is not None
    assert summary.num_steps == job.steps
    assert re.search(r"the trace could not be written: .*No space left on device: '.*t\.json'", capsys.readouterr().out)


def test_epochs_become_steps_by_counting_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1023)  # 1,024 tokens with the end
    summary = train(tiny(tmp_path / "out", tmp_path / "a.txt", steps=None, epochs=2))
    assert summary.num_steps == 8


def test_one_document_is_trained_on_also_where_its_hash_would_hold_it_out(tmp_path: Path) -> None:
    texts = (f"{i:04}" * 128 for i in range(10_000))
    held_out = next(text for text in texts if Split(0.01, held_out=True).has(text))
    (tmp_path / "a.txt").write_text(held_out)
    summary = train(tiny(tmp_path / "out", tmp_path / "a.txt", steps=None, epochs=1, eval_fraction=None))
    assert (summary.num_steps, summary.eval_loss) == (2, None)
    with pytest.raises(DataError, match=r"--eval-fraction 0\.01 holds out all 1 documents"):
        train(tiny(tmp_path / "out", tmp_path / "a.txt", steps=None, epochs=1, eval_fraction=0.01))


class Killed(BaseException):
    """Stands for a kill: no part of the job may catch it."""


def train_until(config: Any, *, step: int, act: Callable[[], None] | None = None) -> Any:
    """Trains, but calls `act` (by default: dies) in the 1-based `step`."""

    def die() -> None:
        raise Killed

    former = loop.Trainer._seed

    def seed(self: Any, number: int) -> None:
        if number + 1 == step:
            (act or die)()
        former(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_seed", seed)
        try:
            return train(config)
        finally:
            for thread in threading.enumerate():
                if thread.name == "unbounded-save":  # a killed process would not leave one
                    thread.join()


def _break_module(patch: pytest.MonkeyPatch, *, step: int, name: str) -> None:
    """Makes the named module return inf in the 1-based `step`."""

    def give_inf(trainer: Any) -> Any:
        module = trainer.model.get_submodule(name)
        return module.register_forward_hook(lambda *_: torch.full_like(_[2], math.inf))

    _break_step(patch, step, give_inf)


def _break_step(patch: pytest.MonkeyPatch, step: int, attach: Callable[[Any], Any]) -> None:
    """Keeps the hooks that `attach` adds to the model only during the 1-based `step`."""
    former = loop.Trainer._seed

    def seed(self: Any, number: int) -> None:
        former(self, number)
        for handle in getattr(self, "broken", []):
            handle.remove()
        if number + 1 == step:
            self.broken = [attach(self)]

    patch.setattr(loop.Trainer, "_seed", seed)


def test_a_batch_beyond_the_budget_is_explained_once_and_whole() -> None:
    """It is torch's own out-of-memory error too, but says itself what would help."""
    assert name_shortage(DeviceShortage("word " * 100 + "end")) == "word " * 100 + "end"
    assert "Lower --micro-batch" in str(name_shortage(torch.OutOfMemoryError("CUDA out of memory.")))
