"""The optimizers to choose from: those whose update of an element depends on that element alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from unbounded.train.options.settings import Settings


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., 2023). torch has none; sharded, the fused kernels run it."""

    unbounded_rule = "lion"

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)


def make_optimizer(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that the settings name, over these param groups."""
    betas, eps, momentum = (settings.beta1, settings.beta2), settings.eps, settings.momentum
    kinds: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": betas, "eps": eps}),
        "adam": (torch.optim.Adam, {"betas": betas, "eps": eps}),
        "sgd": (torch.optim.SGD, {"momentum": momentum}),
        "lion": (Lion, {"betas": betas}),
        "adagrad": (torch.optim.Adagrad, {"eps": eps}),
        "nadam": (torch.optim.NAdam, {"betas": betas, "eps": eps, "decoupled_weight_decay": True}),
        "radam": (torch.optim.RAdam, {"betas": betas, "eps": eps, "decoupled_weight_decay": True}),
        "adamax": (torch.optim.Adamax, {"betas": betas, "eps": eps}),
        "rmsprop": (torch.optim.RMSprop, {"eps": eps, "momentum": momentum}),
        "adadelta": (torch.optim.Adadelta, {"eps": eps}),
    }
    make, options = kinds[settings.optimizer]
    return make(groups, lr=settings.lr, **options)
