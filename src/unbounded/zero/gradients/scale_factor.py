"""What a gradient is multiplied by when it is read: a number, or a scalar tensor that the host never waits for."""

from __future__ import annotations

import torch

ScaleFactor = float | torch.Tensor


def is_one(factor: ScaleFactor) -> bool:
    return isinstance(factor, float) and factor == 1.0


def times(first: ScaleFactor, second: ScaleFactor) -> ScaleFactor:
    if is_one(first):
        return second
    return first if is_one(second) else first * second


def scale_tensor(tensor: torch.Tensor, factor: ScaleFactor) -> None:
    """Multiplies in place. On the host, a factor that the device has computed is read first."""
    tensor.mul_(factor if tensor.is_cuda else float(factor))
