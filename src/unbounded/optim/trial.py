"""Tries what a class declares about its update on small tensors, before it is trusted.

The class updates a matrix and a vector (two matrices, if it was given matrices only) together, as in plain PyTorch, and
once more as the engine would: each tensor by itself and, if it is declared elementwise, each in two flat parts with
their own states. Both must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.optim.class_rules import ClassRule
from unbounded.optim.granularity import Granularity
from unbounded.optim.replica import Replica
from unbounded.optim.rules import Whole

_SHAPES, _MATRICES = ((6, 10), (9,)), ((6, 10), (9, 4))
_STEPS = 3
_TOLERANCE = 1e-5


def try_declared(optimizer: torch.optim.Optimizer, granularity: Granularity) -> None:
    """Raises if the class does not update as it declares."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        only_matrices = granularity is Granularity.TENSOR and all(parameter.dim() == 2 for parameter in own)
        shapes = _MATRICES if only_matrices else _SHAPES
        values = [_draw(shape) for shape in shapes]
        # Of very different sizes, so that a norm over too much shows.
        grads = [[_draw(shape) * 3**index for index, shape in enumerate(shapes)] for _ in range(_STEPS)]
        for group in optimizer.param_groups:
            together = _train_together(optimizer, group, values, grads)
            if granularity is Granularity.TENSOR:
                apart = [_train(optimizer, group, [v], [[g[i]] for g in grads], whole=True) for i, v in _each(values)]
            else:
                apart = [_train_cut(optimizer, group, v, [g[i] for g in grads]) for i, v in _each(values)]
            error = max(float((a - b).abs().max()) for a, b in zip(together, apart, strict=True))
            if not error <= _TOLERANCE:
                _refuse(optimizer, granularity, error)


def _draw(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def _each(values: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(values))


def _train_together(
    optimizer: torch.optim.Optimizer, group: Any, values: Sequence[torch.Tensor], grads: Sequence[Sequence[Any]]
) -> list[torch.Tensor]:
    targets = [nn.Parameter(value.clone()) for value in values]
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for row in grads:
        for target, grad in zip(targets, row, strict=True):
            target.grad = grad.clone()
        states = dict(Replica(optimizer).step(targets, Replica.options(group), states))
    return [target.detach() for target in targets]


def _train(
    optimizer: torch.optim.Optimizer,
    group: Any,
    parts: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor]],
    *,
    whole: bool,
) -> torch.Tensor:
    """The parts of one tensor, each updated by a rule as the engine would."""
    done = []
    for number, part in enumerate(parts):
        granularity = Granularity.TENSOR if whole else Granularity.ELEMENT
        dims = frozenset({part.dim()})
        rule = ClassRule(optimizer, [group], torch.float32, granularity=granularity, dims=dims)
        weight, shape = part.flatten().clone(), tuple(part.shape)
        states = {spec.name: torch.zeros_like(weight) for spec in rule.specs}
        sizes = rule.factor_shapes(shape)
        factors = {name: torch.zeros(size, dtype=torch.float32, device="cpu") for name, size in sizes.items()}
        scalars: dict[str, float] = {}
        for step, row in enumerate(grads, 1):
            scalars = rule.apply(
                rule.resolve(group, step),
                scalars,
                weight=weight,
                grad=row[number].flatten(),
                states=states,
                grad_scale=1.0,
                pool=None,
                whole=Whole(shape, factors) if whole else None,
            )
        done.append(weight)
    return torch.cat(done).view(parts[0].shape if whole else (-1,))


def _train_cut(
    optimizer: torch.optim.Optimizer, group: Any, value: torch.Tensor, grads: Sequence[torch.Tensor]
) -> torch.Tensor:
    at = value.numel() // 3
    cut = [grad.flatten().tensor_split([at]) for grad in grads]
    return _train(optimizer, group, value.flatten().tensor_split([at]), cut, whole=False).view(value.shape)


def _refuse(optimizer: torch.optim.Optimizer, granularity: Granularity, error: float) -> None:
    own = type(optimizer)
    declared = getattr(own, "unbounded_rule", None)
    cut, remedy = (
        ("when a tensor is cut in two", 'Declare "tensor" if every tensor is updated by itself, or leave it out')
        if granularity is Granularity.ELEMENT
        else ("when tensors are updated one by one", "It cannot be sharded")
    )
    raise PlanError(
        f"{own.__module__}.{own.__qualname__} declares unbounded_rule = {declared!r}, but in a trial of {_STEPS} steps "
        f"its updates differ by {error:.1e} {cut}. {remedy}."
    )
