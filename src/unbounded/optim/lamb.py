"""LAMB (You et al., 2020): Adam's step, scaled for every tensor by the ratio of its norm to the step's norm."""

from __future__ import annotations

import math
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
                    self.update(p, p.grad, group)
        return loss

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        mean, square, count = self.advance(p, grad, group)
        beta1, beta2 = group["betas"]
        root = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        step = (mean / (1 - beta1**count)).div_(root).add_(p, alpha=group["weight_decay"])
        p.sub_(step.mul_(self.trust_ratio(p, step) * group["lr"]))

    def advance(
        self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The moments with this gradient, and the number of steps."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return state["exp_avg"], state["exp_avg_sq"], float(state["step"])

    @staticmethod
    def trust_ratio(p: torch.Tensor, step: torch.Tensor, least: float = 0.0, most: float = math.inf) -> torch.Tensor:
        norm, step_norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(step)
        ratio = (norm / step_norm).clamp(least, most)
        return torch.where((norm > 0) & (step_norm > 0), ratio, torch.ones_like(norm))
