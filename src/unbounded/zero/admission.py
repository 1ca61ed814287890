"""What may be sharded: everything that `shard` was given is checked before anything is touched."""

from __future__ import annotations

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.zero.blueprint import DTYPES
from unbounded.zero.optimizer import ShardedOptimizer
from unbounded.zero.parameter import ManagedParameter
from unbounded.zero.units import Member, find_members


def check_model(model: nn.Module, *, is_known: bool) -> list[Member]:
    """The parameters of a model that can be sharded. One that `is_known` to be sharded cannot."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"shard was given a {type(model).__name__} as the model. Give an nn.Module.")
    members = find_members(model)
    managed = [member.names[0] for member in members if isinstance(member.parameter, ManagedParameter)]
    if is_known or managed:
        whose = f" (its parameter {managed[0]!r})" if managed else ""
        raise PlanError(f"this model is already sharded{whose}. Call shard once, and keep the model it returns.")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise PlanError(
                f"the embedding {name!r} has sparse gradients, which cannot be reduced over flat buffers. "
                "Make it with sparse=False."
            )
    first: dict[str, str] = {}
    for member in members:
        first.setdefault(str(member.parameter.device), member.names[0])
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise PlanError(
            f"the model's parameters are on different devices: {places}. Move the whole model to one of them first."
        )
    return members


def check_optimizer(optimizer: torch.optim.Optimizer | None, members: list[Member]) -> dict[int, int]:
    """The group of every parameter the optimizer trains, by the parameter's id."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"shard was given a {type(optimizer).__name__} as the optimizer. Give a torch.optim optimizer.")
    if isinstance(optimizer, ShardedOptimizer):
        raise PlanError("this optimizer is already sharded. Give the torch.optim optimizer it was made from.")
    names = {id(member.parameter): member.names[0] for member in members}
    groups: dict[int, int] = {}
    foreign = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in groups:
                raise PlanError(
                    f"the optimizer has the parameter {names.get(id(parameter))!r} twice. List it in one group."
                )
            if parameter.numel() == 0:
                continue
            foreign += id(parameter) not in names
            groups[id(parameter)] = index
    if foreign:
        raise PlanError(
            f"the optimizer has {foreign} parameters that the model does not. "
            "Make it from model.parameters() of this model."
        )
    missing = [m.names[0] for m in members if m.parameter.requires_grad and id(m.parameter) not in groups]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise PlanError(f"the optimizer misses the trainable parameters {shown}. Give them to it, or freeze them.")
    return groups


def compute_device(members: list[Member]) -> torch.device:
    """Where a model with these parameters will run."""
    device = members[0].parameter.device if members else torch.device("cpu")
    if device.type == "cuda":
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    if device.type not in ("cpu", "meta"):
        raise PlanError(f"the model is on {device}, which is not supported. Use CPU, CUDA or the meta device.")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def common_precision(model: nn.Module) -> str:
    """The precision that most of a model's parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    known = [dtype for dtype in counts if dtype in names]
    return names[max(known, key=lambda dtype: counts[dtype])] if known else "fp32"
