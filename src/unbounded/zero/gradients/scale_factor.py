"""What a gradient is multiplied by when it is read: a number, or a scalar tensor that the host never waits for."""

from __future__ import annotations

import weakref

import torch

ScaleFactor = float | torch.Tensor

_latest: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None  # a tensor, its version, its value then


def factor_of(number: float | torch.Tensor) -> ScaleFactor:
    """The value that `number` has now, in fp32 at least: a tensor may change before the gradient is read."""
    if not isinstance(number, torch.Tensor):
        return float(number)
    return _device_value(number) if number.is_cuda else float(number.detach())


def forget_factors() -> None:
    """Tensors may have other values from now on: collectives, graphs and `.data` write without a new version."""
    global _latest
    _latest = None


def _device_value(number: torch.Tensor) -> torch.Tensor:
    """One copy for all gradients that are multiplied by the same tensor, so that units see that it is one factor."""
    global _latest
    latest, version = _latest, -1 if number.is_inference() else number._version
    if latest is None or latest[0]() is not number or latest[1] != version or version < 0:
        dtype = torch.promote_types(number.dtype, torch.float32)
        _latest = latest = weakref.ref(number), version, number.detach().to(dtype, copy=True).reshape(())
    return latest[2]


def is_one(factor: ScaleFactor) -> bool:
    return isinstance(factor, float) and factor == 1.0


def times(first: ScaleFactor, second: ScaleFactor) -> ScaleFactor:
    if is_one(first):
        return second
    return first if is_one(second) else first * second


def scale_tensor(tensor: torch.Tensor, factor: ScaleFactor) -> None:
    """Multiplies in place. On the host, a factor that the device has computed is read first."""
    tensor.mul_(factor if tensor.is_cuda else float(factor))
