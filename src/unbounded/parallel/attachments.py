"""What is attached to a user's modules for a parallel axis. Everything that attaches returns how to detach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Detach = Callable[[], None]


def replace_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Detach:
    """Gives the instance another `forward`, made from the one it has."""
    had = module.__dict__.get("forward")
    module.__dict__["forward"] = make(module.forward)

    def detach() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = had

    return detach


def set_attributes(module: nn.Module, values: Mapping[str, Any]) -> Detach:
    """Gives attributes that the module has other values."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)

    def restore() -> None:
        for name, value in before.items():
            setattr(module, name, value)

    return restore


def together(*detaches: Detach) -> Detach:
    """One function that calls several removing functions, last first."""

    def detach() -> None:
        for each in reversed(detaches):
            each()

    return detach
