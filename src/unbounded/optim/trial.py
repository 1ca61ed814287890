"""Tries what a class declares about its update on small tensors, before it is trusted.

For each param group, the class updates a matrix and a vector (two matrices, if it was given no vector) together, as in
plain PyTorch, and once more as the engine would: each tensor by itself and, if it is declared elementwise, each in two
flat parts with their own states; or, if it is declared to be a fused rule, by that. Both must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.optim.class_rules import ClassRule
from unbounded.optim.granularity import Granularity
from unbounded.optim.recognition import Recognised
from unbounded.optim.replica import Replica, take_step
from unbounded.optim.rules import NativeRule, UpdateRule, Whole

_SHAPES, _MATRICES = ((6, 10), (9,)), ((6, 10), (9, 4))
_STEPS = 3
_RATE = 1e-2  # whatever a warm-up begins with: with a rate of 0, everything would agree
_TOLERANCE = 1e-5

Rows = Sequence[Sequence[torch.Tensor]]
"""The gradients of all tensors, by step."""


def try_declared(optimizer: torch.optim.Optimizer, known: Recognised) -> None:
    """Raises if the class does not update as it declares."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        is_fused = not known.has_own_step and not any(group.get("amsgrad") for group in optimizer.param_groups)
        for group in map(_at_some_rate, optimizer.param_groups):
            no_vectors = known.granularity is Granularity.TENSOR and all(own.dim() > 1 for own in group["params"])
            shapes = _MATRICES if no_vectors else _SHAPES
            values = [_draw(shape) for shape in shapes]
            # Of very different sizes, so that a norm over too much shows.
            grads = [[_draw(shape) * 3**index for index, shape in enumerate(shapes)] for _ in range(_STEPS)]
            if is_fused:
                _try_fused(optimizer, known, group, values, grads)
            else:
                _try_apart(optimizer, known, group, values, grads)


def _draw(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def _at_some_rate(group: dict[str, Any]) -> dict[str, Any]:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        return {**group, "lr": torch.full_like(rate, _RATE, device="cpu")}
    return {**group, "lr": _RATE} if isinstance(rate, (int, float)) else group


def _try_fused(
    optimizer: torch.optim.Optimizer, known: Recognised, group: Any, values: Sequence[torch.Tensor], grads: Rows
) -> None:
    together = None
    with suppress(Exception):  # one that runs on GPUs alone, or only stands for the rule, is believed
        together, _ = _train_together(optimizer, group, values, grads)
    if together is None:
        return
    apart = []
    for index, value in enumerate(values):
        initial_sum = float(optimizer.defaults.get("initial_accumulator_value", 0.0))
        rule = NativeRule(known.kind, [group], torch.float32, "exact", initial_sum=initial_sum)
        apart.append(_train(rule, group, value.flatten(), [row[index].flatten() for row in grads]))
    if (error := _difference(together, apart)) > _TOLERANCE:
        remedy = 'Declare what it is: "elementwise" if every element is updated by itself, "tensor" if every tensor is'
        _refuse(optimizer, f"its updates differ by {error:.1e} from those of {known.kind}", remedy)


def _try_apart(
    optimizer: torch.optim.Optimizer, known: Recognised, group: Any, values: Sequence[torch.Tensor], grads: Rows
) -> None:
    is_whole, rules = known.granularity is Granularity.TENSOR, []
    for value in values:  # raises if the class takes no such tensor
        dims = frozenset({value.dim() if is_whole else 1})
        rules.append(ClassRule(optimizer, [group], torch.float32, granularity=known.granularity, dims=dims))
    together, changed = _train_together(optimizer, group, values, grads)
    if changed:
        _refuse(
            optimizer,
            f"it changes {', '.join(changed)}, which no step would keep for the next one",
            "Keep what changes in the state of each parameter",
        )
    apart = []
    for index, (rule, value) in enumerate(zip(rules, values, strict=True)):
        rows = [row[index] for row in grads]
        if is_whole:
            apart.append(_train(rule, group, value, rows))
        else:
            at = value.numel() // 3
            parts = [part.flatten().tensor_split([at]) for part in (value, *rows)]
            apart.append(torch.cat([_train(rule, group, part, row) for part, *row in zip(*parts, strict=True)]))
    if (error := _difference(together, apart)) <= _TOLERANCE:
        return
    if known.granularity is Granularity.ELEMENT:
        remedy = 'Declare "tensor" if every tensor is updated by itself, or leave it out'
        _refuse(optimizer, f"its updates differ by {error:.1e} when a tensor is cut in two", remedy)
    _refuse(optimizer, f"its updates differ by {error:.1e} when tensors are updated one by one", "It cannot be sharded")


def _train_together(
    optimizer: torch.optim.Optimizer, group: Any, values: Sequence[torch.Tensor], grads: Rows
) -> tuple[list[torch.Tensor], list[str]]:
    """What plain PyTorch makes of the values, and which numbers outside the states have changed."""
    targets, options = [nn.Parameter(value.clone()) for value in values], Replica.options(group)
    copy = Replica(optimizer).copy(targets, options)
    attributes = dict(vars(copy))
    for row in grads:
        for target, grad in zip(targets, row, strict=True):
            target.grad = grad.clone()
        take_step(copy)
    changed = [f"the option {name!r}" for name in _changed(Replica.options(group), copy.param_groups[0])]
    changed += [f"the attribute {name!r}" for name in _changed(attributes, vars(copy))]
    return [target.detach() for target in targets], changed


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The numbers that are others now."""
    numbers = {
        name: value
        for name, value in after.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
    return [name for name, value in numbers.items() if name not in before or not bool(before[name] == value)]


def _train(rule: UpdateRule, group: Any, value: torch.Tensor, grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor, updated by a rule as the engine would. Returns it flat."""
    weight, shape = value.flatten().clone(), tuple(value.shape)
    states = {spec.name: torch.full_like(weight, spec.initial) for spec in rule.specs}
    sizes = rule.factor_shapes(shape)
    factors = {name: torch.zeros(size, dtype=torch.float32, device="cpu") for name, size in sizes.items()}
    scalars: dict[str, float] = {}
    for step, grad in enumerate(grads, 1):
        scalars = rule.apply(
            rule.resolve(group, step),
            scalars,
            weight=weight,
            grad=grad.flatten(),
            states=states,
            grad_scale=1.0,
            pool=None,
            whole=Whole(shape, factors) if rule.granularity is Granularity.TENSOR else None,
        )
    return weight


def _difference(together: Sequence[torch.Tensor], apart: Sequence[torch.Tensor]) -> float:
    """The greatest difference; a NaN counts as an infinite one."""
    greatest = [float((a.flatten() - b).abs().max()) for a, b in zip(together, apart, strict=True)]
    return max(error if error == error else torch.inf for error in greatest)


def _refuse(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    own = type(optimizer)
    raise PlanError(
        f"{own.__module__}.{own.__qualname__} declares unbounded_rule = {getattr(own, 'unbounded_rule', None)!r}, but "
        f"in a trial of {_STEPS} steps {what}. {remedy}."
    )
