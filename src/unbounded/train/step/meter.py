"""Speed and memory over a run: turns what a step returned into what is shown and recorded."""

from __future__ import annotations

import time
from typing import Any

from unbounded.observe import trace
from unbounded.observe.lanes import LaneTotal
from unbounded.observe.progress import Step, Tier
from unbounded.train.options.settings import Settings
from unbounded.train.step.loop import Outcome

_SMOOTHING = 0.9


class SpeedMeter:
    """Counts from its construction on. The speed leaves out the first step, which warms everything up."""

    def __init__(self, settings: Settings, *, flops_per_token: float, world_size: int, first_step: int) -> None:
        self._settings, self._flops, self._world_size = settings, flops_per_token, world_size
        self._first_step = first_step
        self._lanes_at_start = self._lanes_before = trace.lane_totals()
        self._start = self._before = time.perf_counter()
        self._step_seconds = 0.0
        self._warm_seconds, self._num_warm = 0.0, 0
        self.first_seconds: float | None = None  # of the first step, with what it compiles and allocates
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._start

    @property
    def step_seconds(self) -> float:
        """The mean of the steps after the first."""
        return self._warm_seconds / self._num_warm if self._num_warm else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, the mean of the steps after the first."""
        return self._settings.batch_tokens * self._num_warm / self._warm_seconds if self._num_warm else 0.0

    @property
    def tflops(self) -> float:
        """Of each device, the mean over the run."""
        return self._tflops(self.tokens_per_second)

    def lanes(self) -> dict[str, LaneTotal]:
        """What the lanes did since the run began."""
        now = trace.lane_totals()
        return {name: total - self._lanes_at_start.get(name, LaneTotal()) for name, total in now.items()}

    def count(self, number: int, outcome: Outcome, optimizer: Any, *, epoch: float = 0.0) -> Step:
        """Count a finished step (`number` counts from 1)."""
        rate = self._settings.batch_tokens / outcome.seconds
        if number > self._first_step + 1:
            self._num_warm += 1
            self._warm_seconds += outcome.seconds
        smoothed = _SMOOTHING * self._step_seconds + (1 - _SMOOTHING) * outcome.seconds
        self._step_seconds = smoothed if self._num_warm > 1 else outcome.seconds
        self.first_seconds = outcome.seconds if self.first_seconds is None else self.first_seconds
        self.first_loss = outcome.loss if self.first_loss is None else self.first_loss
        self.last_loss = outcome.loss
        return Step(
            step=number,
            num_steps=self._settings.steps,
            loss=outcome.loss,
            norm=outcome.norm,
            lr=outcome.lr,
            epoch=epoch,
            seconds=outcome.seconds,
            tokens_per_second=rate,
            tflops=self._tflops(rate),
            peak_tflops=self._settings.peak_tflops,
            seconds_left=(self._settings.steps - number) * self._step_seconds,
            tiers=tiers_of(optimizer),
            lanes=self._rates(),
        )

    def _tflops(self, tokens_per_second: float) -> float:
        return self._flops * tokens_per_second / self._world_size / 1e12

    def _rates(self) -> dict[str, float]:
        now, totals = time.perf_counter(), trace.lane_totals()
        elapsed, self._before = now - self._before, now
        before, self._lanes_before = self._lanes_before, totals
        busy = {name: total - before.get(name, LaneTotal()) for name, total in totals.items()}
        return {name: total.busy_seconds / elapsed for name, total in busy.items() if total.count}


def tiers_of(optimizer: Any) -> dict[str, Tier]:
    """What each tier holds, as the optimizer says."""
    return {
        name: Tier(use.used_bytes, use.budget_bytes, use.activation_bytes) for name, use in optimizer.memory().items()
    }
