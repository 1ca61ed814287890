"""What parallel axes need to know of a model: its lists of repeated blocks, and the loss its own forward calls."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The model that peft wraps, or the model."""
    if type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return model.get_base_model()  # type: ignore[no-any-return, operator]
    return model


def find_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of blocks that run one after another: those a `pp_plan` names, or the outermost lists of one class."""
    named = _planned(model)
    if named:
        return named
    stacks: list[nn.ModuleList] = []
    seen: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module not in seen:
            children = list(module)
            seen.update(inner for inner in module.modules() if inner is not module)
            is_stack = len({type(child) for child in children}) == 1 and next(children[0].children(), None) is not None
            if is_stack and next(module.parameters(), None) is not None:
                stacks.append(module)
    return stacks


def _planned(model: nn.Module) -> list[nn.ModuleList]:
    """The lists that a transformers model's own pipeline plan names."""
    plan: Any = getattr(model, "_pp_plan", None) or {}
    modules = dict(model.named_modules())
    found = (modules.get(name) for name in plan)
    return [module for module in found if isinstance(module, nn.ModuleList) and len(module)]


def asked_loss(base: nn.Module) -> str:
    """The name of the `loss_function` that a transformers model's own forward calls; empty if it calls none."""
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return ""
    return str(getattr(getattr(base, "loss_function", None), "__name__", ""))
