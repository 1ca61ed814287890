"""LAMB (You et al., 2020): Adam's step, scaled for every tensor by the ratio of its norm to the step's norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class LAMB(torch.optim.Optimizer):
    """The update of the paper's Algorithm 2, with decoupled weight decay inside the ratio.

    A tensor or a step of norm 0 has the ratio 1. It works unsharded too.
    """

    unbounded_rule = "tensor"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        (beta1, beta2), count = group["betas"], float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        step = (mean / (1 - beta1**count)).div_(root).add_(p, alpha=group["weight_decay"])
        norm, step_norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(step)
        ratio = torch.where((norm > 0) & (step_norm > 0), norm / step_norm, torch.ones_like(norm))
        p.sub_(step.mul_(ratio * group["lr"]))
