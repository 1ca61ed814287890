"""The optimizers to choose from, over the param groups of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from unbounded.errors import InputError
from unbounded.optim.lamb import LAMB
from unbounded.train.options.settings import Settings

Group = dict[str, Any]
_NOT_DECAYED = (nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


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


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trained parameters: matrices with decay; norms, biases and embeddings without."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NOT_DECAYED) or "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (others if parameter.ndim < 2 or id(parameter) in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
    """The optimizer that the settings name, over the trained parameters; Muon comes with an AdamW for the rest."""
    groups = weight_decay_groups(model, settings.weight_decay)
    if settings.optimizer != "muon":
        return _make(settings.optimizer, groups, settings)
    hidden, rest = _split(model, groups)
    if not hidden:
        raise InputError("the model has no matrix that Muon could train. Choose another --optimizer.")
    # Its steps are scaled to the size of AdamW's, so that one learning rate is right for both.
    muon = torch.optim.Muon(hidden, lr=settings.lr, adjust_lr_fn="match_rms_adamw")
    return [muon, _make("adamw", rest, settings)] if rest else muon


def _split(model: nn.Module, groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Groups of the inner matrices, for Muon, and of the rest: embeddings, the head, and other shapes."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    outside = {id(parameter) for module in outer for parameter in module.parameters()}

    def pick(is_hidden: bool) -> list[Group]:
        picked = [
            {**group, "params": [p for p in group["params"] if (p.ndim == 2 and id(p) not in outside) == is_hidden]}
            for group in groups
        ]
        return [group for group in picked if group["params"]]

    return pick(True), pick(False)


def _make(name: str, groups: list[Group], settings: Settings) -> torch.optim.Optimizer:
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
        "lamb": (LAMB, {"betas": betas, "eps": eps}),
        "adafactor": (torch.optim.Adafactor, {}),
    }
    make, options = kinds[name]
    return make(groups, lr=settings.lr, **options)
