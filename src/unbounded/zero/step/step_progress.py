"""Where between two steps an optimizer is: what a checkpoint must keep of it besides states and param groups."""

from __future__ import annotations

from dataclasses import dataclass

from unbounded.zero.step.loss_scale import LossScale


@dataclass(frozen=True)
class StepProgress:
    """`scaled` says whether a loss was scaled since the last step."""

    loss_scale: LossScale | None
    skipped_steps: int
    scaled: bool
