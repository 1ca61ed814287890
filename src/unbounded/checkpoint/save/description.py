"""What a manifest says besides tensors: parameters, configuration, optimizer. Plain values from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from unbounded.checkpoint.format import values
from unbounded.errors import StateError
from unbounded.zero.members import find_members
from unbounded.zero.step.optimizer import ShardedOptimizer
from unbounded.zero.unit import Unit


def describe_parameters(model: nn.Module, units: Sequence[Unit]) -> dict[str, Any]:
    """Every parameter by name, with its counts."""
    names = {member.names[0]: member.names[1:] for member in find_members(model)}
    described: dict[str, Any] = {}
    for unit in units:
        for slot, step in zip(unit.layout.slots, unit.steps, strict=True):
            entry: dict[str, Any] = {"shape": list(slot.global_shape), "trainable": unit.trainable}
            if names.get(slot.name):
                entry["aliases"] = names[slot.name]
            if step:
                entry["step"] = int(step)
            described[slot.name] = entry
    return described


def owned_scalars(units: Sequence[Unit]) -> dict[str, dict[str, float]]:
    """The scalars of parameters that this rank updates, wholly or in part; those of others are not current here."""
    found = {}
    for unit in units:
        for index, (slot, scalars) in enumerate(zip(unit.layout.slots, unit.scalars, strict=True)):
            if scalars and unit.is_updated_here(index):
                found[slot.name] = {key: float(value) for key, value in scalars.items()}
    return found


def used_names(units: Sequence[Unit]) -> list[str]:
    """The parameters that got a gradient on this rank since the last step."""
    return [
        slot.name
        for unit in units
        for slot, used in zip(unit.layout.slots, unit.gradient.used, strict=True)
        if used and unit.gradient.is_new
    ]


def describe_config(model: nn.Module) -> dict[str, Any]:
    """A Hugging Face model's configuration, so that a checkpoint can be exported without the model."""
    found = {}
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "to_json_string"):
            found[name] = config.to_json_string(use_diff=False) if name == "config" else config.to_json_string()
    return found


def describe_optimizer(optimizer: ShardedOptimizer, model: nn.Module, put: values.Put) -> dict[str, Any]:
    """Param groups with their hyper-parameters, the loss scale, and where in a step the optimizer is."""
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise StateError(
                    f"a parameter of shape {tuple(parameter.shape)} that the optimizer trains was removed from the "
                    "model after `shard`, so it has no name to be saved under. Put its module back, or remove it "
                    "before `shard`."
                )
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = values.encode(options, f"param_groups[{index}]", put)
        groups.append({"names": [names[id(p)] for p in group["params"]], "options": encoded})
    progress = optimizer.progress()
    return {
        "kind": optimizer.kind,
        "groups": groups,
        "loss_scale": None if progress.loss_scale is None else asdict(progress.loss_scale),
        "skipped_steps": progress.skipped_steps,
        "scaled": progress.scaled,
        "clip": None,  # gradients are saved as they are, clipped ones too
    }
