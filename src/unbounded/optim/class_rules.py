"""Rules that run an optimizer's own class: on flat stretches if it is elementwise, otherwise on whole tensors.

What the class keeps is found by a trial on small tensors whose sizes are different primes: a state with the
parameter's shape is an array like any other, one of another shape is a *factor*, whose sides are sides of the parameter
or constants, and a number is a scalar. On the first update of a parameter the class begins its states itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError, StateError
from unbounded.native import kernels
from unbounded.optim import formats
from unbounded.optim.granularity import Granularity
from unbounded.optim.replica import Replica
from unbounded.optim.rules import Groups, Scalars, StateSpec, Whole

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
FactorSide = tuple[str, int]  # ("dim", a dim of the parameter) or ("size", a constant)


@dataclass(frozen=True)
class Kept:
    """What a class keeps for parameters with so many dims."""

    arrays: tuple[str, ...]
    factors: Mapping[str, tuple[FactorSide, ...]]
    scalars: Mapping[str, Any]  # with an example of each


class ClassRule:
    """The step of `optimizer`'s class, for parameters of `dtype` that are in `groups` and have so many `dims`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        dtype: torch.dtype,
        *,
        granularity: Granularity,
        dims: frozenset[int] = frozenset({1}),
    ) -> None:
        self.granularity = granularity
        self._replica = Replica(optimizer)
        is_half = dtype in (torch.bfloat16, torch.float16)
        self._dtype = torch.float32 if is_half else dtype
        self.format = "exact" if dtype == torch.bfloat16 else "fp32"
        is_whole = granularity is Granularity.TENSOR
        having = {num: _having(groups, num) if is_whole else groups for num in sorted(dims)}
        self._kept = {num: _look(self._replica, having[num], num, self._dtype) for num in having}
        common = set.intersection(*(set(kept.arrays) for kept in self._kept.values()))
        completing = [StateSpec("remainder", torch.int16)] if dtype == torch.bfloat16 else []
        completing += [StateSpec("master", torch.float32)] if dtype == torch.float16 else []
        first = self._kept[min(dims)]
        self.specs = (*completing, *(StateSpec(name, self._dtype) for name in first.arrays if name in common))
        self._arrays = tuple(spec.name for spec in self.specs[len(completing) :])
        if not is_whole and first.factors:
            raise PlanError(
                f"{type(optimizer).__name__} keeps {', '.join(first.factors)} in a shape other than the parameter's, "
                'so it is not elementwise. Declare unbounded_rule = "tensor" if it treats every tensor by itself.'
            )

    def factor_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The states of a parameter of `shape` that are not arrays of the unit, by name."""
        if self.granularity is not Granularity.TENSOR:
            return {}
        sizes = tuple(shape) or (1,)
        kept = self._kept[len(sizes)]
        found = {name: tuple(sizes[at] if side == "dim" else at for side, at in t) for name, t in kept.factors.items()}
        return found | {name: sizes for name in kept.arrays if name not in self._arrays}

    def resolve(self, group: Mapping[str, Any], step: int) -> tuple[dict[str, Any], int]:
        return Replica.options(group), step

    def has_parts(self, numbers: tuple[dict[str, Any], int]) -> bool:
        return False

    def apply(
        self,
        numbers: tuple[dict[str, Any], int],
        scalars: Scalars,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        grad_scale: float | torch.Tensor,
        pool: kernels.Pool | None,
        whole: Whole | None = None,
    ) -> dict[str, float]:
        options, step = numbers
        shape, factors = (whole.shape or (1,), whole.factors) if whole is not None else (tuple(weight.shape), {})
        target = nn.Parameter(self._open(weight, states).view(shape))
        target.grad = (grad.to(self._dtype) * grad_scale).view(shape)
        buffers = {name: states[name].view(shape) for name in self._arrays} | dict(factors)
        kept = self._kept[len(shape)]
        held = {} if step == 1 else {**buffers, **_numbers(kept, scalars, step)}
        after = self._replica.step([target], options, {target: held})[target]
        self._refuse_late(after.keys() - buffers.keys() - kept.scalars.keys(), after, step)
        for name, buffer in buffers.items():
            value = after.get(name)
            if isinstance(value, torch.Tensor) and value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)
        self._close(target.detach().view(-1), weight, states)
        return {name: float(after[name]) for name in kept.scalars if name != "step" and name in after}

    def _refuse_late(self, names: Iterable[str], after: Mapping[str, Any], step: int) -> None:
        """Raises if the class has begun a state for which there is no place: the next update would lack it."""
        late = sorted(name for name in names if after[name] is not None)
        if late:
            raise StateError(
                f"{self._replica.name} began to keep {', '.join(late)} in update {step} of a parameter, but nothing of "
                "that in the two updates that `shard` tried, so there is no place for it. Begin all states in the "
                "first update, and set what they depend on before `shard`."
            )

    def _open(self, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values that are trained, to be changed in place."""
        if "remainder" in states:
            return formats.decode_weight({"weight": weight, **states}, self)
        return states.get("master", weight)

    def _close(self, values: torch.Tensor, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        if "remainder" in states:
            encoded = formats.encode_weight(values, weight.dtype, self)
            weight.copy_(encoded["weight"])
            states["remainder"].copy_(encoded["remainder"])
        elif "master" in states:
            weight.copy_(values)


def _having(groups: Groups, num_dims: int) -> Groups:
    """The groups with parameters of `num_dims`: a class may refuse them in others. All of them if none has any yet."""
    return [group for group in groups if any(max(1, own.dim()) == num_dims for own in group["params"])] or groups


def _look(replica: Replica, groups: Groups, num_dims: int, dtype: torch.dtype) -> Kept:
    """What the class keeps for a parameter of `num_dims` in any of the groups, which may differ."""
    shape = _PRIMES[:num_dims]
    held: dict[str, Any] = {}
    for group in groups:
        probe = nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
        state: dict[str, Any] = {}
        for _ in range(2):
            probe.grad = torch.ones(shape, dtype=dtype, device="cpu")
            try:
                state = dict(replica.step([probe], Replica.options(group), {probe: state}).get(probe, {}))
            except (ValueError, RuntimeError, AssertionError, IndexError) as error:
                why = str(error) or repr(error)
                raise PlanError(
                    f"{replica.name} cannot update a parameter with {num_dims} dims ({why}). Give such parameters to "
                    "another optimizer: shard(model, [one, other])."
                ) from error
        held |= {name: value for name, value in state.items() if value is not None}
    arrays, factors, scalars = [], {}, {}
    for name, value in held.items():
        size = tuple(getattr(value, "shape", ()))
        if isinstance(value, torch.Tensor) and size == shape:
            arrays.append(name)
        elif isinstance(value, torch.Tensor) and size:
            factors[name] = tuple(("dim", shape.index(n)) if n in shape else ("size", n) for n in size)
        elif isinstance(value, (torch.Tensor, int, float)):
            scalars[name] = value
        else:
            raise PlanError(
                f"the optimizer keeps {name!r}, a {type(value).__name__}, which "
                "cannot be placed on a tier. Keep tensors or numbers."
            )
    return Kept(tuple(arrays), factors, scalars)


def _numbers(kept: Kept, scalars: Scalars, step: int) -> dict[str, Any]:
    """The scalars of a parameter before its update number `step`, each as the class keeps it."""
    found: dict[str, Any] = {}
    for name, example in kept.scalars.items():
        value = float(step - 1) if name == "step" else scalars.get(name, 1.0)
        is_tensor = isinstance(example, torch.Tensor)
        found[name] = torch.tensor(value, dtype=example.dtype, device="cpu") if is_tensor else type(example)(value)
    return found
