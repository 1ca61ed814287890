"""The training job from end to end.

join ranks -> close settings -> build on meta -> shard -> resume -> [ batch, step, log, evaluate, save ] -> end
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from unbounded.errors import DataError, DiskError, InputError, TrainingError
from unbounded.observe import trace
from unbounded.observe.amounts import show_count
from unbounded.train.data.encoding import describe_replaced
from unbounded.train.data.heldout import pack_held_out
from unbounded.train.data.loader import Loader, merge
from unbounded.train.data.sample import Sequence
from unbounded.train.job.finish import export_model, sample_text
from unbounded.train.job.guard import Guard, name_shortage
from unbounded.train.job.interrupts import SIGNALS, Interrupts
from unbounded.train.job.output import RunFolder
from unbounded.train.job.outputs import check_outputs, describe_run
from unbounded.train.job.prepare import count_epoch, open_data, set_schedule, shard_subject
from unbounded.train.job.run_record import RunRecord
from unbounded.train.job.summary import Summary, predict_seconds
from unbounded.train.model import build
from unbounded.train.options.config import Config
from unbounded.train.options.contradictions import check, plan_fields
from unbounded.train.options.fitting import fit_all
from unbounded.train.options.settings import close_length, close_settings
from unbounded.train.step.loop import Outcome, Trainer
from unbounded.train.step.meter import SpeedMeter, tiers_of
from unbounded.train.step.packing import check_separation
from unbounded.train.world import World, join_world, using_threads


def run(config: Config) -> Summary:
    """All ranks must call this. Trains as `config` says and returns a summary."""
    config = fit_all(config)
    check(config)
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would fight the optimizer's
    axes = {key: size for key, size in plan_fields(config).items() if key in ("tensor", "pipeline", "context")}
    world = join_world(config.device, **axes)
    try:
        return TrainingJob(config, world).run()
    finally:
        world.close()


class TrainingJob:
    """One run. The constructor refuses what cannot work before anything is allocated."""

    def __init__(self, config: Config, world: World) -> None:
        self.world = world
        settings = close_settings(
            config, kind=world.device.type, num_ranks=world.data.size, device_bytes=world.device_bytes()
        )
        check_outputs(settings)
        self.subject = build(settings)
        evaluates = config.eval_fraction is not None or config.eval_data is not None  # asked for
        self.train_data, self.eval_data = open_data(settings, self.subject.tokenizer, asked=evaluates)
        tokens = 0 if settings.steps else count_epoch(self.train_data, world)
        self.settings = close_length(settings, config, tokens_per_epoch=tokens)
        self.num_parameters, self.num_trained = self.subject.num_parameters, self.subject.num_trained
        self.flops_per_token = self.subject.flops_per_token(self.settings.sequence_length)
        self.names_output = config.output is not None
        self.loader = Loader(self.train_data, rows=self.settings.rows, rank=world.data.rank, num_ranks=world.data.size)
        self.folder = RunFolder(Path(self.settings.output), world, self.settings.keep_last)
        self.held_out = self._hold_out(asked=evaluates)
        self.eval_loss: float | None = None
        self.saved_step = -1

    def run(self) -> Summary:
        """Train to the end, or until a signal comes."""
        anew = self._begins_anew()
        more = {
            "steps": self.settings.steps,
            "trace": self.settings.trace and str(trace.check_path(self.settings.trace)),
        }
        try:
            threads = self.folder.claim(describe_run(self.settings), more, anew=anew, threads=self.settings.threads)
            with using_threads(threads):
                return self._run(anew)
        finally:
            self.folder.release()

    def _run(self, anew: bool) -> Summary:
        self.model, self.optimizer, self.scheduler = shard_subject(self.subject, self.settings, self.world)
        self.trainer = Trainer(self.model, self.optimizer, self.scheduler, self.settings, self.world)
        if self.settings.packing == "separated":
            check_separation(self.model, self.world.device)
        step = 0 if anew else self._resume()
        self.record = RunRecord(self.settings, self.folder.root, self.world, step)
        self.guard = Guard(self.settings, self.trainer, self.folder, self.record.say)
        trace.time_device(True)
        try:
            self._introduce(step)
            self.meter = SpeedMeter(
                self.settings, flops_per_token=self.flops_per_token, world_size=self.world.size, first_step=step
            )
            with Interrupts() as interrupts:
                step, stopped_by = self._train(step, interrupts)
                return self._finish(step, stopped_by)
        except Exception as error:
            shortage = name_shortage(error)
            if isinstance(error, DiskError) and shortage is None:  # stays one, with its errno
                error.args = (f"{error} {self.guard.last_checkpoint}",)
            if shortage is None:
                raise
            raise TrainingError(f"{shortage} {self.guard.last_checkpoint}") from error
        finally:
            trace.time_device(False)
            self.loader.close()
            self.record.close()

    def _hold_out(self, *, asked: bool) -> list[Sequence]:
        """The evaluation set; empty if there is none, which is an error only if one was asked for."""
        if self.eval_data is None or not self.settings.eval_every:
            return []
        try:
            return pack_held_out(self.eval_data, self.settings.eval_tokens)
        except DataError:
            if asked:
                raise
            return []

    def _begins_anew(self) -> bool:
        """Whether to ignore checkpoints that are there: if the user says so, or if they finished the demonstration."""
        newest = max(self.folder.steps(), default=0)
        finished_demonstration = newest >= self.settings.steps and not self.names_output
        return self.settings.resume == "never" or (self.settings.resume == "auto" and finished_demonstration)

    def _resume(self) -> int:
        """Load the last checkpoint, if there is one; returns the number of steps done."""
        settings = self.settings
        extra = self.folder.load(self.model, self.optimizer)
        if extra is None:
            if settings.resume == "must":
                raise InputError(f'there is no checkpoint in "{self.folder.root}" to resume. Leave out --resume must.')
            return 0
        if not settings.restart_data:
            self.loader.load_state_dict(extra["data"])
        set_schedule(self.scheduler, self.optimizer, extra["num_updates"])
        self.saved_step = int(extra["step"])
        return self.saved_step

    def _introduce(self, step: int) -> None:
        settings, say = self.settings, self.record.say
        what = settings.model or settings.from_config or f"a GPT of {settings.layers} blocks over bytes"
        say(
            f"training {what}: {show_count(self.num_parameters)} parameters, {settings.precision}, on "
            f"{self.world.size} x {self.world.device.type}; {len(self.train_data.reader.source.files)} files, "
            f"{settings.steps} steps of {settings.batch_tokens:,} tokens"
        )
        corpora = [corpus for corpus in (self.train_data, self.eval_data) if corpus is not None]
        files = dict.fromkeys(file for corpus in corpora for file in corpus.reader.source.files)
        for line in describe_replaced(files) if self.world.is_first else []:
            say(line)
        say(repr(self.optimizer.plan))
        if self.optimizer.plan.compile and step < settings.steps:
            say("blocks are compiled in the first step, which takes longer (--plan compile=false trains without)")
        if step >= settings.steps:
            say(
                f'this run is finished: "{self.folder.last}" has all {settings.steps} steps. Nothing is trained. Raise '
                "--steps to continue, or start over with --resume never."
            )
        elif step:
            say(f'resumed from "{self.folder.last}" after step {step}')

    # -- the loop --------------------------------------------------------------------------------------------------

    def _train(self, step: int, interrupts: Interrupts) -> tuple[int, int | None]:
        """Train until the end, or until any rank gets a signal; returns the last step and that signal."""
        saved_at = time.monotonic()
        while step < self.settings.steps:
            batch = self.loader.next()
            outcome = self.trainer.step(step, batch, partial(self._vote, interrupts, saved_at))
            self.guard.judge(step + 1, batch, outcome)
            step += 1
            self._log(step, outcome)
            if self._is_due(step, self.settings.eval_every):
                self._evaluate(step)
            *stops, wants_save = outcome.votes
            if self._is_due(step, self.settings.checkpoint_every) or wants_save:
                self._save(step)
                saved_at = time.monotonic()
            if any(stops):
                return step, next(number for number, wants in zip(SIGNALS, stops, strict=True) if wants)
        return step, None

    def _vote(self, interrupts: Interrupts, saved_at: float) -> tuple[float, ...]:
        """What this rank asks all ranks to do: stop for one of the signals or, if it is the first, save on time."""
        minutes = self.settings.checkpoint_minutes
        is_time = minutes is not None and self.world.is_first and time.monotonic() - saved_at > 60 * minutes
        return *(float(interrupts.received == number) for number in SIGNALS), float(is_time)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0 and step < self.settings.steps

    def _log(self, step: int, outcome: Outcome) -> None:
        shown = self.meter.count(step, outcome, self.optimizer, epoch=self.loader.epoch)
        self.record.write_step(shown, outcome, data_wait_seconds=self.loader.wait_seconds)

    def _evaluate(self, step: int) -> None:
        if self.held_out:
            self.eval_loss = self.trainer.evaluate(self.held_out)
            self.record.write_evaluation(step, self.eval_loss)

    def _save(self, step: int) -> None:
        if step == self.saved_step:
            return
        data = merge(self.world.collect(self.loader.state_dict()))
        extra = {"step": step, "data": data, "num_updates": self.scheduler.last_epoch}
        path = self.folder.save(step, self.model, self.optimizer, extra)
        self.saved_step = step
        self.record.say(f'step {step}: saving to "{path}"')

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, step: int, stopped_by: int | None) -> Summary:
        seconds, lanes = self.meter.seconds, self.meter.lanes()
        self.record.stop_trace()
        done = stopped_by is None
        if done:
            self._evaluate(step)
        self._save(step)
        self.folder.settle()
        sample = sample_text(self.model, self.subject.tokenizer, self.settings, self.world) if done else ""
        exported = export_model(self.model, self.subject.tokenizer, self.settings) if done else None
        return Summary(
            output=self.folder.root,
            checkpoint=self.folder.last,
            step=step,
            num_steps=self.settings.steps,
            num_parameters=self.num_parameters,
            num_trained=self.num_trained,
            first_loss=self.meter.first_loss,
            last_loss=self.meter.last_loss,
            eval_loss=self.eval_loss,
            tokens_per_second=self.meter.tokens_per_second,
            tflops=self.meter.tflops,
            seconds=seconds,
            tiers=tiers_of(self.optimizer),
            lanes=lanes,
            sample=sample,
            exported=exported,
            trace=self.record.trace_path,
            signal=stopped_by,
            predicted_seconds=predict_seconds(self.model, self.settings, self.world.data.size),
            step_seconds=self.meter.step_seconds,
            first_seconds=self.meter.first_seconds,
            speaks=self.world.is_first,
        )
