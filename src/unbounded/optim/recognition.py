"""Which update an optimizer object stands for: read from its class by identity or by declaration, never by its name.

A stock class of torch.optim stands for itself, and so does a subclass that leaves the update alone, as those that
frameworks make. A class whose update is one of the rules here without being torch's says so with a class attribute,
`unbounded_rule = "lion"`. Wrappers that only pass calls on are looked through.
"""

from __future__ import annotations

import inspect

import torch

from unbounded.errors import PlanError

STOCK: tuple[type[torch.optim.Optimizer], ...] = tuple(
    getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "NAdam", "RMSprop", "Adamax", "RAdam", "Adadelta")
)
DECLARED = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}
"""What a class may declare as its `unbounded_rule`, and the kind that it then is."""

_WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer",
    "lightning.fabric.wrappers._FabricOptimizer",
    "lightning_fabric.wrappers._FabricOptimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer",
}
_UPDATE = ("step", "_init_group")
"""The methods that make a stock optimizer's update what it is."""


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside wrappers of frameworks that only pass calls on."""
    while any(f"{kind.__module__}.{kind.__qualname__}" in _WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the rule that an optimizer stands for: that of a stock class, or "Lion". Others are refused."""
    own = type(optimizer)
    declared = getattr(own, "unbounded_rule", None)
    if declared is not None:
        if declared not in DECLARED:
            raise PlanError(
                f"{_full(own)} declares unbounded_rule = {declared!r}. It may be one of {', '.join(DECLARED)}."
            )
        return DECLARED[declared]
    stock = next((kind for kind in own.__mro__ if kind in STOCK), None)
    if stock is None:
        raise PlanError(
            f"{_full(own)} cannot be run exactly on partitioned states, because its update of an element may depend "
            f"on others. Use one of {', '.join(kind.__name__ for kind in STOCK)} of torch.optim or, if its update is "
            f'exactly that of one of {", ".join(DECLARED)}, declare it: `unbounded_rule = "lion"` in the class.'
        )
    changed = [name for name in _UPDATE if _function(own, name) is not _function(stock, name)]
    if changed:
        raise PlanError(
            f"{_full(own)} has a {changed[0]} of its own, which would not run: the engine updates the states itself, "
            f"as torch.optim.{stock.__name__} does. Give a torch.optim.{stock.__name__}, and do what {changed[0]} adds "
            "in the training loop."
        )
    return stock.__name__


def _function(kind: type, name: str) -> object:
    """A method without the wrappers that torch puts around it when the first instance is made."""
    return inspect.unwrap(getattr(kind, name))


def _full(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
