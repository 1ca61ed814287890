"""The norm of a model's gradients over every rank and tier, and the factor that clips them to a maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch

from unbounded.ranks.axis import Axis
from unbounded.ranks.failures import Failures
from unbounded.zero.gradients import gradient_value
from unbounded.zero.gradients.scale_factor import ScaleFactor
from unbounded.zero.unit import Unit

Number = float | torch.Tensor  # a tensor if the device has it, so that the host does not wait


def unit_squares(units: Sequence[Unit], failures: Failures) -> list[Number]:
    """The sum of squares of every unit's gradient on this rank, as the backwards have taken it."""
    squares: list[Number] = []
    with failures.noting():
        gradient_value.measure_together(unit.gradient for unit in units)
        squares += [unit.gradient.squares() for unit in units]
    failures.meet()
    return squares


def norm_dtype(units: Sequence[Unit]) -> torch.dtype:
    """That of the norm of the gradients of `units`: the widest one of theirs, and no less than fp32."""
    return reduce(torch.promote_types, (unit.dtype for unit in units), torch.float32)


def total_norm(squares: Sequence[Number], over: Sequence[Axis], device: torch.device, dtype: torch.dtype) -> Number:
    """All ranks of the axes `over` must call this. The norm of what has these squares on every rank, in `dtype`."""
    tensors = [part for part in squares if isinstance(part, torch.Tensor)]
    total: Number = float(sum(part for part in squares if not isinstance(part, torch.Tensor)))
    if tensors:
        total = torch.stack(tensors).double().sum() + total
    if any(axis.size > 1 for axis in over):
        held = torch.as_tensor(total, dtype=torch.float64, device=device)
        for axis in over:
            held = axis.sum(held)
        total = held if tensors else float(held)
    if isinstance(total, torch.Tensor):
        return total.sqrt().to(dtype)
    return float(torch.tensor(math.sqrt(total) if total >= 0 else math.nan, dtype=dtype, device="cpu"))


def clip_factor(norm: Number, max_norm: float, dtype: torch.dtype) -> ScaleFactor:
    """What gradients of this norm are multiplied by so that it is at most `max_norm`, as torch computes it."""
    if isinstance(norm, torch.Tensor):
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return float((max_norm / (torch.tensor(norm, dtype=dtype, device="cpu") + 1e-6)).clamp(max=1.0))
