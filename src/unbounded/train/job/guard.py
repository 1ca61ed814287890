"""Handles a loss or gradient that is not finite: the step is skipped, and `on_nan` says whether the run stops."""

from __future__ import annotations

import errno
from collections.abc import Callable

import torch

from unbounded.errors import BudgetError, TrainingError
from unbounded.train.data.loader import Batch
from unbounded.train.job.output import RunFolder
from unbounded.train.options.settings import Settings
from unbounded.train.step.loop import Outcome, Trainer, find_culprit

_MAX_SKIPPED = 10  # in a row: so many are not an accident


class Guard:
    """Watches the outcomes of steps."""

    def __init__(self, settings: Settings, trainer: Trainer, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._settings, self._trainer, self._folder, self._say = settings, trainer, folder, say
        self._num_skipped = 0

    def judge(self, step: int, batch: Batch, outcome: Outcome) -> None:
        """All ranks must call this. Raises TrainingError if the policy says so."""
        if outcome.stepped:
            self._num_skipped = 0
            return
        self._num_skipped += 1
        fact = self._describe(step, batch, outcome)
        if self._settings.on_nan == "skip" and self._num_skipped < _MAX_SKIPPED:
            self._say(f"{fact} The step is skipped.")
            return
        many = f" {self._num_skipped} steps in a row were skipped." if self._num_skipped > 1 else ""
        raise TrainingError(
            f"{fact}{many} {self.last_checkpoint} Lower --lr, or pass --on-nan skip to skip such steps."
        )

    @property
    def last_checkpoint(self) -> str:
        """A sentence that names it."""
        last = self._folder.find_last()
        return f'The last checkpoint is "{last}".' if last else "There is no checkpoint yet."

    def _describe(self, step: int, batch: Batch, outcome: Outcome) -> str:
        what = "loss" if outcome.loss - outcome.loss != 0 else "gradient"
        inputs = torch.from_numpy(batch.inputs[: self._settings.micro_batch]).to(self._trainer.world.device)
        culprits = [name for name in self._trainer.world.collect(find_culprit(self._trainer.model, inputs)) if name]
        units = [name for names in self._trainer.world.collect(self._trainer.broken_units) for name in names]
        where = f' The first output that is not finite is that of "{culprits[0]}".' if culprits else ""
        if not where and units:
            where = (
                f' The gradient of unit "{units[-1]}" is not finite.'  # the last in order is the first in the backward
            )
        return f"step {step}: the {what} is not finite (loss {outcome.loss:g}, norm {outcome.norm:g}).{where}"


def name_shortage(error: BaseException) -> str | None:
    """If `error` says that memory or disk ran out, what to tell the user; None for any other error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {_one_line(error).rstrip('.')}. Free some space, or choose --output or --disk-path on "
            "another disk."
        )
    if isinstance(error, BudgetError):  # its message already says what would help
        return " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device is out of memory: {_one_line(error)} Lower --micro-batch or --device-bytes."
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"the host is out of memory: {_one_line(error)}. Lower --micro-batch or --host-bytes."
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
