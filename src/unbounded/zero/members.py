"""The parameters and buffers of a model as its module tree holds them: each once, with every place that has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unbounded.errors import UnsavableError


@dataclass(eq=False)
class Member:
    """One parameter with every place in the module tree that holds it; the first is its name."""

    parameter: nn.Parameter
    names: list[str]
    holders: list[tuple[nn.Module, str]]
    whole: nn.Parameter | None = None  # the parameter that this is a tile of
    first: int = 0  # the element of that parameter that this begins with


def find_members(model: nn.Module) -> list[Member]:
    """Every distinct parameter with elements, in the order of registration."""
    members: dict[int, Member] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.numel() == 0:
                continue
            member = members.setdefault(id(parameter), Member(parameter, [], []))
            member.names.append(f"{prefix}.{name}" if prefix else name)
            if not any(holder is module and attribute == name for holder, attribute in member.holders):
                member.holders.append((module, name))
    return list(members.values())


def persistent_buffers(model: nn.Module, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """The buffers that `state_dict` has; those of a module in several places under its first name, or under each.

    Raises if one is sparse: files hold dense tensors.
    """
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=not every_name):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    for name, buffer in found.items():
        if buffer.layout is not torch.strided:
            raise UnsavableError(
                f"the buffer {name!r} is a tensor of layout {buffer.layout}, which checkpoints and exports cannot "
                "hold. Register it with persistent=False, and make it where its module is made."
            )
    return found
