"""What a run records and shows, on its first rank: metrics, boards, the display and the trace."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from unbounded.errors import InputError
from unbounded.observe import trace
from unbounded.observe.boards import open_boards
from unbounded.observe.metrics import Metrics
from unbounded.observe.progress import Progress, Step
from unbounded.observe.report.display import open_progress
from unbounded.train.options.settings import Settings
from unbounded.train.step.loop import Outcome
from unbounded.train.world import World


class RunRecord:
    """Open from the first step to the end of a run; `say` is for sentences."""

    def __init__(self, settings: Settings, folder: Path, world: World, first_step: int) -> None:
        self._settings, self._world = settings, world
        self.trace_path: Path | None = None
        self._trace_end = first_step + settings.trace_steps
        self._metrics: Metrics | None = None
        self._progress: Progress = open_progress(speaks=world.is_first, log_every=settings.log_every)
        self.say = self._progress.say
        if world.is_first:
            about = {key: value for key, value in asdict(settings).items() if value is not None}
            boards = open_boards(settings.report_to, folder, after_step=first_step, settings=about)
            self._metrics = Metrics(folder, after_step=first_step, boards=boards)
        if settings.trace is not None and first_step < settings.steps:
            trace.start(settings.trace)

    def write_step(self, shown: Step, outcome: Outcome, *, data_wait_seconds: float) -> None:
        """A step is over."""
        self._progress.show(shown)
        if self._metrics is not None:
            self._metrics.write(
                "step",
                shown.step,
                loss=outcome.loss,
                grad_norm=outcome.norm,
                lr=shown.lr,
                epoch=shown.epoch,
                num_targets=outcome.num_targets,
                seconds=outcome.seconds,
                tokens_per_second=shown.tokens_per_second,
                tflops=shown.tflops,
                data_wait_seconds=data_wait_seconds,
                sequence_length=outcome.sequence_length,
                lanes=shown.lanes,
                memory={name: tier.used_bytes for name, tier in shown.tiers.items()},
                budget={name: tier.budget_bytes for name, tier in shown.tiers.items() if tier.budget_bytes is not None},
            )
        if shown.step == self._trace_end:
            self.stop_trace()

    def write_evaluation(self, step: int, loss: float) -> None:
        """An evaluation is over."""
        perplexity = math.exp(min(loss, 700.0))
        self.say(f"step {step}: held-out loss {loss:.4f}, perplexity {perplexity:.3f}")
        if self._metrics is not None:
            self._metrics.write("eval", step, loss=loss, perplexity=perplexity)

    def stop_trace(self) -> None:
        """Write the trace, if one is being recorded. A run goes on if that fails: its states matter more."""
        if self._settings.trace is None or not trace.is_recording():
            return
        try:
            self.trace_path = trace.stop()
        except (OSError, InputError) as error:
            self.say(f"the trace could not be written: {error}")

    def close(self) -> None:
        """The run is over."""
        self.stop_trace()
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close()
