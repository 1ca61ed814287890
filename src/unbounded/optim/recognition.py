"""Which update an optimizer object stands for: read from its class by identity or by declaration.

A stock class of torch.optim stands for itself, and so does a subclass that leaves the update alone, as those that
frameworks make. Any other class declares itself with a class attribute: `unbounded_rule = "lion"` if its update is one
of the fused rules, "elementwise" if every element is updated by itself, "tensor" if every tensor is. It is believed
only after a trial (`optim/trial.py`). Wrappers that only pass on calls are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unbounded.errors import PlanError
from unbounded.optim.granularity import Granularity
from unbounded.optim.joined import JoinedOptimizer

STOCK: tuple[type[torch.optim.Optimizer], ...] = tuple(
    getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "NAdam", "RMSprop", "Adamax", "RAdam", "Adadelta", "Rprop", "ASGD")
)
WHOLE: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Muon, torch.optim.Adafactor)
"""Optimizers whose update of an element depends on its whole tensor."""
_ADAFACTOR = "transformers.optimization.Adafactor"
DECLARED = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}
"""The fused rules that a class may declare as its `unbounded_rule`, and the kind that each one means."""
_OWN = {"elementwise": Granularity.ELEMENT, "tensor": Granularity.TENSOR}

_WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer",
    "lightning.fabric.wrappers._FabricOptimizer",
    "lightning_fabric.wrappers._FabricOptimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer",
}
_UPDATE = ("step", "_init_group")
"""The methods that make a stock optimizer's update what it is."""


@dataclass(frozen=True)
class Recognised:
    """`kind` names the update. What a class only declared is tried before it is believed.

    `has_own_step` says that the class's own step runs because it declared no more than its granularity.
    """

    kind: str
    granularity: Granularity
    is_declared: bool = False
    has_own_step: bool = False


def unwrap(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """The optimizer inside frameworks' wrappers that only pass on calls; several are joined into one."""
    if isinstance(optimizer, (list, tuple)):
        return JoinedOptimizer([unwrap(one) for one in optimizer])
    while any(_full(kind) in _WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer  # type: ignore[union-attr]
    return optimizer  # type: ignore[return-value]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the update that an optimizer stands for, or of those that were joined. Others are refused."""
    if isinstance(optimizer, JoinedOptimizer):
        return " + ".join(kind_of(member) for member in optimizer.members)
    return recognise(optimizer).kind


def recognise(optimizer: torch.optim.Optimizer) -> Recognised:
    """Which update one optimizer stands for. Others are refused."""
    own = type(optimizer)
    _refuse_other_ways(optimizer)
    declared = getattr(own, "unbounded_rule", None)
    if declared is not None:
        return _read_declared(own, declared)
    stock = next((kind for kind in own.__mro__ if kind in (*STOCK, *WHOLE) or _full(kind) == _ADAFACTOR), None)
    if stock is None:
        raise PlanError(
            f"{_full(own)} cannot be run exactly on partitioned states, because its update of an element may depend "
            f"on others. Use one of {', '.join(kind.__name__ for kind in (*STOCK, *WHOLE))} of torch.optim. If its "
            f'update is exactly that of one of {", ".join(DECLARED)}, declare it: `unbounded_rule = "lion"` in the '
            'class; "elementwise" if every element is updated by itself, "tensor" if every tensor is.'
        )
    changed = [name for name in _UPDATE if _function(own, name) is not _function(stock, name)]
    if changed:
        raise PlanError(
            f"{_full(own)} has its own {changed[0]}, which would not run: the engine updates the states itself, "
            f"as {stock.__name__} does. Give a torch.optim.{stock.__name__} and do what {changed[0]} adds in the "
            'training loop, or declare `unbounded_rule = "elementwise"` in the class if that is what it is.'
        )
    if _full(stock) == _ADAFACTOR:
        return Recognised("transformers.Adafactor", Granularity.TENSOR)
    return Recognised(stock.__name__, Granularity.TENSOR if stock in WHOLE else Granularity.ELEMENT)


def _refuse_other_ways(optimizer: torch.optim.Optimizer) -> None:
    """Raises if the object changes weights in a way that would not run: neither by its class's step nor in a hook."""
    own = type(optimizer)
    patched = vars(optimizer).get("step")
    if patched is not None and _bare(patched) is not _function(own, "step"):
        raise PlanError(
            f"the step of this {own.__name__} object was replaced by another one, which would not run: the engine "
            "updates the states itself. Do what it adds in the training loop or in a hook (register_step_pre_hook), or "
            "make an optimizer class of it."
        )
    if callable(getattr(own, "eval", None)):
        raise PlanError(
            f"{_full(own)} has an eval(), as schedule-free optimizers have, which changes weights outside of step and "
            "would not run. Use an optimizer that changes weights in step alone."
        )


def _read_declared(own: type, declared: object) -> Recognised:
    if declared in DECLARED:
        return Recognised(DECLARED[str(declared)], Granularity.ELEMENT, is_declared=True)
    if declared in _OWN:
        return Recognised(own.__qualname__, _OWN[str(declared)], is_declared=True, has_own_step=True)
    raise PlanError(
        f"{_full(own)} declares unbounded_rule = {declared!r}. It may be one of {', '.join((*DECLARED, *_OWN))}."
    )


def _function(kind: type, name: str) -> object:
    """A method without the wrappers that torch puts around it when the first instance is made."""
    return _bare(getattr(kind, name, None))


def _bare(method: Any) -> Any:
    """Without wrappers that say what they wrap, as those of schedulers do."""
    unwrapped = inspect.unwrap(method)
    return getattr(unwrapped, "__func__", unwrapped)


def _full(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
