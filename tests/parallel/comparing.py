"""Training a model in plain PyTorch on one rank and in parallel on several, for tests that say what the plan is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import unbounded
from tests.parallel import models

STEPS = 5
MAX_NORM = 0.5  # below the norms of these models, so that clipping is part of every comparison


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # eps: at 1e-8 Adam's first step is the sign of a gradient, also of one that is nothing but rounding.
    return torch.optim.AdamW(groups, lr=2e-3, eps=1e-5)


def train_plain(model: nn.Module, family: str, *, copies: int = 1, steps: int = STEPS) -> list[float]:
    """Losses and norms of the whole model on the batches of all copies, gradients averaged."""
    optimizer = optimizer_of(model)
    torch.manual_seed(11)
    numbers = []
    for step in range(steps):
        total = 0.0
        for copy_ in range(copies):
            loss = model(**models.batch(family, step, copy_)).loss / copies
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [total, float(norm)]
    return numbers


def train_parallel(
    model: nn.Module, optimizer: Any, family: str, *, data_rank: int = 0, steps: int = STEPS
) -> list[float]:
    """The loop a user would write."""
    torch.manual_seed(11)
    numbers = []
    for step in range(steps):
        loss = model(**models.batch(family, step, data_rank)).loss
        loss.backward()
        norm = optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), float(norm)]
    return numbers


def without_dropout(model: nn.Module) -> nn.Module:
    """Ranks of a data axis draw from random states of their own, which one rank cannot repeat."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and type(value) is float:
                setattr(module, name, 0.0)
    return model


def worst_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor in the 2-norm, and whose it is."""
    assert found.keys() == wanted.keys()
    errors = [(float((found[name] - value).norm() / (value.norm() + 1e-3)), name) for name, value in wanted.items()]
    return max(errors)


def compare(rank: int, size: int, family: str, plans: list[dict[str, Any]], changes: dict[str, Any]) -> list[Any]:
    """The numbers of one rank and of each plan, with the error of the weights, for every plan."""
    results = []
    model = models.build(family, **changes)
    references: dict[int, tuple[list[float], dict[str, torch.Tensor]]] = {}
    for plan in plans:
        tensor = plan.get("tensor", 1) * plan.get("context", 1)
        copies = size // tensor
        own = copy.deepcopy(model) if copies == 1 else without_dropout(copy.deepcopy(model))
        if copies not in references:
            plain = copy.deepcopy(own)
            references[copies] = train_plain(plain, family, copies=copies), plain.state_dict()
        expected, weights = references[copies]
        own, optimizer = unbounded.shard(own, optimizer_of(own), plan)
        numbers = train_parallel(own, optimizer, family, data_rank=rank // tensor)
        losses = optimizer.engine.axes.data.sum(torch.tensor(numbers[::2])) / copies
        results.append(
            (
                expected,
                [x for pair in zip(losses.tolist(), numbers[1::2], strict=True) for x in pair],
                worst_error(own.state_dict(), weights),
            )
        )
    return results
