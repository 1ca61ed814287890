"""`deepspeed.ops.lamb`: LAMB as DeepSpeed computes it."""

from __future__ import annotations

from typing import Any

import torch

from unbounded.optim.lamb import LAMB


class FusedLamb(LAMB):
    """The ratio of norms is kept between `min_coeff` and `max_coeff`, and the bias correction scales the whole step.

    So weight decay is scaled by it too, in contrast to the paper's algorithm (`unbounded.optim.LAMB`).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise ValueError(f"max_grad_norm is {max_grad_norm}. Give gradient_clipping in the config instead")
        if amsgrad:
            raise ValueError("amsgrad is not a part of LAMB. Leave it out")
        super().__init__(params, lr, (betas[0], betas[1]), eps, weight_decay)
        options = {
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self.defaults.update(options)
        for group in self.param_groups:
            group.update({key: value for key, value in options.items() if key not in group})

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        mean, square, count = self.advance(p, grad, group)
        root = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])
        step = (mean / root).add_(p, alpha=group["weight_decay"])
        ratio = self.trust_ratio(p, step, least=group["min_coeff"], most=group["max_coeff"])
        (beta1, beta2), rate = group["betas"], group["lr"]
        if group["bias_correction"]:
            rate *= (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        p.sub_(step.mul_(ratio * rate))
