"""What parallel axes need to know of a model: its lists of repeated blocks, and the loss its own forward calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unbounded.errors import StateError
from unbounded.ranks.axis import Axis


def unwrap(model: nn.Module) -> nn.Module:
    """The model that peft wraps, or the model."""
    if type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return model.get_base_model()  # type: ignore[no-any-return, operator]
    return model


Stack = nn.ModuleList | nn.Sequential


def find_stacks(model: nn.Module) -> Sequence[Stack]:
    """The lists of blocks that run one after another: those a `pp_plan` names, or the outermost lists of one class.

    If there is no such list, it is sequences of modules that are of one class.
    """
    return _planned(model) or _lists(model) or _sequences(model)


def _lists(model: nn.Module) -> list[nn.ModuleList]:
    stacks: list[nn.ModuleList] = []
    seen: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in seen:
            seen.update(inner for inner in module.modules() if inner is not module)
            if _is_stack(module):
                stacks.append(module)
    return stacks


def _sequences(model: nn.Module) -> list[nn.Sequential]:
    found = [module for module in model.modules() if isinstance(module, nn.Sequential) and _is_stack(module)]
    inside = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in inside and module is not model]


def _is_stack(blocks: Stack) -> bool:
    """Whether all are of one class, with modules inside them."""
    if len({type(block) for block in blocks}) != 1 or next(blocks[0].children(), None) is None:
        return False
    return next(blocks.parameters(), None) is not None


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


def take_tokens(whole: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of the tokens, which are in the second dim."""
    count = whole.shape[1] // axis.size
    return whole.narrow(1, axis.rank * count, count)


def cut_arguments(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: torch.Tensor, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with a part of the hidden states, and with it of positions and their tables."""
    length = part.shape[1] * axis.size

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if isinstance(value, torch.Tensor) and value.dim() in (2, 3) and value.shape[1] == length:
            return take_tokens(value, axis)
        return value

    args, kwargs = tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}
    return replace_hidden(block, args, kwargs, part)


def replace_hidden(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with other hidden states."""
    return change_hidden(module, args, kwargs, lambda _: hidden)


def change_hidden(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, or of a module in one, with its hidden states changed: the first tensor it is given."""
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    name = next((name for name in ("hidden_states", *named) if name in named), None)
    if name is None:
        raise StateError(
            f"{type(module).__name__} was called without a tensor, so its part of the sequence cannot be found. Pass "
            "hidden states as its first argument, or leave sequence and context out of the plan."
        )
    return args, {**kwargs, name: change(named[name])}
