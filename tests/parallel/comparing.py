"""Trains a model in plain PyTorch on one rank and in parallel on several, for tests that say what the plan is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.parallel import models
from tests.parallel.meshes import blocks

STEPS = 2  # the second begins with the states that the first made, in the order that it recorded
MAX_NORM = 0.5  # below the norms of these models, so that clipping is part of every comparison


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # eps: at 1e-8 Adam's first step is the sign of a gradient, even of one that is only rounding.
    return torch.optim.AdamW(groups, lr=2e-3, eps=1e-5)


def counted_labels(family: str, labels: torch.Tensor) -> torch.Tensor:
    return labels != -100 if family in ("bert", "t5") else labels[:, 1:] != -100


def train_plain(
    model: nn.Module, family: str, *, copies: int = 1, num_micros: int = 1, steps: int = STEPS
) -> list[float]:
    """Losses and norms of the whole model on the batches of all copies, in parts whose labels weigh alike."""
    optimizer = optimizer_of(model)
    torch.manual_seed(11)
    numbers = []
    for step in range(steps):
        total = 0.0
        for copy_ in range(copies):
            batch = models.batch(family, step, copy_, device=next(model.parameters()).device)
            count = counted_labels(family, batch["labels"]).sum()
            for micro in range(num_micros):
                part = {name: value.chunk(num_micros)[micro] for name, value in batch.items()}
                weight = counted_labels(family, part["labels"]).sum() / count / copies
                loss = model(**part).loss.nan_to_num() * weight  # the mean over no labels is NaN
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [total, float(norm)]
    return numbers


def train_parallel(model: nn.Module, optimizer: Any, family: str, *, steps: int = STEPS) -> list[float]:
    """The loop a user would write: losses, averaged over the data axis, and norms."""
    axes = optimizer.engine.axes
    pipeline = unbounded.pipeline(model) if axes.pipeline.size > 1 else None
    torch.manual_seed(11 + (axes.data.rank if axes.data.size > 1 else 0))
    numbers = []
    for step in range(steps):
        batch = models.batch(family, step, axes.data.rank, device=optimizer.engine.device)
        if pipeline is not None:
            loss = pipeline(**batch)
        else:
            loss = model(**batch).loss
            optimizer.scale(loss).backward()
        norm = optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(axes.data.sum(loss.detach().clone()) / axes.data.size), float(norm)]
    return numbers


def without_dropout(model: nn.Module) -> nn.Module:
    """Ranks of a data axis draw from their own random states, which one rank cannot repeat."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and type(value) is float:
                setattr(module, name, 0.0)
    return model


def worst_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor in the 2-norm, and the tensor's name."""
    assert found.keys() == wanted.keys()
    pairs = [(name, found[name].cpu(), value.cpu()) for name, value in wanted.items()]
    return max((float((own - value).norm() / (value.norm() + 1e-3)), name) for name, own, value in pairs)


def compare(
    rank: int,
    size: int,
    family: str,
    plans: list[dict[str, Any]],
    changes: dict[str, Any],
    steps: int = STEPS,
    device: str = "cpu",
) -> list[Any]:
    """For every plan the numbers of all ranks; on the first one also those of one rank and the error of the weights."""
    results = []
    references: dict[Any, tuple[list[float], dict[str, torch.Tensor]]] = {}
    for plan in plans:
        depth = blocks(family, plan)
        own = models.build(family, **(changes | depth)).to(device)
        copies = size // plan.get("tensor", 1) // plan.get("context", 1) // plan.get("pipeline", 1)
        own = own if copies == 1 else without_dropout(own)
        key = copies, plan.get("microbatches", 1), *depth.values()
        if rank == 0 and key not in references:
            plain = copy.deepcopy(own)
            numbers = train_plain(plain, family, copies=copies, num_micros=key[1], steps=steps)
            references[key] = numbers, plain.state_dict()
        own, optimizer = unbounded.shard(own, optimizer_of(own), plan)
        found, values = train_parallel(own, optimizer, family, steps=steps), own.state_dict()
        expected, weights = references.get(key, ([], values))
        results.append((expected, found, worst_error(values, weights)))
    return results


def check(results: list[list[Any]], tolerance: float = 1e-5) -> None:
    """What `compare` returned on all ranks agrees with one rank."""
    for number, (expected, _, worst) in enumerate(results[0]):
        assert worst[0] < 10 * tolerance, (number, worst)
        for per_rank in results:
            assert per_rank[number][1] == pytest.approx(expected, rel=tolerance), number
