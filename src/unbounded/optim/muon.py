"""Muon on a GPU: what its class does to every element around the orthogonalisation, in two kernels.

Run as it is, the class goes over a matrix in memory about twenty times, which takes a third as long as the products.
The kernels make the same bits. Of large matrices half of the products is computed (`symmetric_products`). On a CPU, and
for weights without a `remainder`, the class itself runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unbounded.native import kernels
from unbounded.optim.class_rules import ClassRule
from unbounded.optim.rules import Scalars, Whole

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # an older torch has no Muon; in a newer one they may have other names, and its class runs as it is
    _zeropower_via_newtonschulz = _adjust_lr = None  # type: ignore[assignment]


class MuonRule(ClassRule):
    """The step of `torch.optim.Muon`."""

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
        if weight.device.type != "cuda" or "remainder" not in states or _adjust_lr is None:
            return super().apply(
                numbers,
                scalars,
                weight=weight,
                grad=grad,
                states=states,
                grad_scale=grad_scale,
                pool=pool,
                whole=whole,
            )
        from unbounded.optim.device import device_kernels
        from unbounded.optim.device.symmetric_products import orthogonalise, pays

        assert whole is not None
        options, step = numbers
        lr = float(options["lr"])
        direction = device_kernels.muon_direction(
            grad,
            grad_scale,
            states["momentum_buffer"],
            momentum=options["momentum"],
            nesterov=options["nesterov"],
            is_first=step == 1,
        )
        direction = direction.view(whole.shape)
        method = orthogonalise if pays(direction) else _zeropower_via_newtonschulz
        direction = method(direction, options["ns_coefficients"], options["ns_steps"], options["eps"])
        device_kernels.decay_and_add(
            weight,
            states["remainder"],
            direction.contiguous(),
            keep=1 - lr * options["weight_decay"],
            alpha=-_adjust_lr(lr, options["adjust_lr_fn"], torch.Size(whole.shape)),
        )
        return {}
