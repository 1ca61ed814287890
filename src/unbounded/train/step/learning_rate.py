"""The learning rate over a run, as a factor of each group's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def lr_factor(*, steps: int, warmup: int, decay: str, final: float) -> Callable[[int], float]:
    """The factor on the peak learning rate at each step, from 0-based `step`; `final` is the factor at the end."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if decay == "constant":
            return 1.0
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        left = 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return final + (1.0 - final) * left

    return factor


def make_scheduler(
    optimizer: torch.optim.Optimizer, factor: Callable[[int], float]
) -> torch.optim.lr_scheduler.LambdaLR:
    """A scheduler that is stepped once after every optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
