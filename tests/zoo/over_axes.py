"""An architecture of the zoo over a parallel axis, compared with plain PyTorch on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import unbounded
from tests.parallel.comparing import optimizer_of
from tests.zero.training import relative_error
from tests.zoo.architectures import ARCHITECTURES, Architecture, batch

STEPS = 3


def train(architecture: Architecture, optimizer: Any, run: Callable[..., torch.Tensor]) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = run(**batch(architecture, step, 0))
        if loss.requires_grad:  # a pipeline has run its backwards
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda **given: model(**given).loss


def compare_over(rank: int, world_size: int, name: str, plan: dict[str, Any]) -> str | tuple[float, float]:
    """The largest errors of the losses and of a parameter's values, or how the plan was refused."""
    torch.manual_seed(5)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    plain = copy.deepcopy(model)
    expected = train(architecture, optimizer_of(plain), loss_of(plain))
    try:
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        run = unbounded.pipeline(model) if "pipeline" in plan else loss_of(model)
        found, values = train(architecture, optimizer, run), model.state_dict()
    except unbounded.UnboundedError as error:
        return f"{type(error).__name__}: {error}"
    wanted = {key: value for key, value in plain.state_dict().items() if value.is_floating_point()}
    return (
        max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)),
        max(relative_error(values[key], value) for key, value in wanted.items() if "running_" not in key),
    )
