"""The optimizer's groups and its learning rate over the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_NOT_DECAYED = (nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trained parameters: matrices with decay; norms, biases and embeddings without."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NOT_DECAYED) or "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (others if parameter.ndim < 2 or id(parameter) in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


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
