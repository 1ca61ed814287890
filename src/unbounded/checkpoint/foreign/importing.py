"""`import_checkpoint`: converts a foreign checkpoint into one of ours, parameter by parameter.

A skeleton of modules with the checkpoint's names stands for the model. It is sharded like any model on the meta device
and then saved: each module reads its own parameters when it is initialised, and its moments when its unit is placed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.foreign.content import Content, StoredGroup, StoredParameter
from unbounded.checkpoint.foreign.deepspeed import is_deepspeed, read_deepspeed
from unbounded.checkpoint.foreign.distributed import is_distributed, read_distributed
from unbounded.checkpoint.format.values import encode
from unbounded.checkpoint.saving import save
from unbounded.errors import CheckpointError, UnsavableError
from unbounded.paths import expand_home
from unbounded.ranks import launch
from unbounded.ranks.mesh import world_axis
from unbounded.sharding.placing import shard


def import_checkpoint(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Content:
    """All ranks must call this. Writes the DeepSpeed ZeRO-3 or torch distributed checkpoint in `source` to `folder`.

    It keeps weights, moments, step counts, param groups and buffers. `unbounded.load` then reads it like any other
    checkpoint, under any plan. Pickled objects are refused. Returns what was found. If one rank cannot read it, all
    ranks raise. Ranks that wait for one that never calls this say so after a minute.
    """
    launch.join(launch.spare_device())
    content = _read_alike(expand_home(source))
    skeleton = build_skeleton(content)
    optimizers = _build_optimizers(skeleton, content)
    plan = {"stage": 3, "disk_path": str(expand_home(folder).absolute().parent)}
    model, sharded = shard(skeleton, optimizers[0] if len(optimizers) == 1 else optimizers or None, plan)
    save(folder, model, sharded, **_plain(content.extra))
    return content


def _read_alike(path: Path) -> Content:
    """All ranks must call this. What is in the folder, if every rank can read it."""
    content, error = None, None
    try:
        content = _read(path)
    except Exception as caught:
        error = caught
    world_axis().agree(error, what="unbounded.import_checkpoint()")
    assert content is not None
    return content


def _read(path: Path) -> Content:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Give the folder that the checkpoint was saved to.")
    if is_deepspeed(path):
        return read_deepspeed(path)
    if is_distributed(path):
        return read_distributed(path)
    raise CheckpointError(
        f"{path} holds neither a DeepSpeed checkpoint (*_model_states.pt) nor a torch distributed checkpoint "
        "(.metadata). For safetensors use shard(weights=folder)."
    )


class SkeletonModule(nn.Module):
    """A module of the skeleton: its initialisation reads its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, StoredParameter] = {}

    def forward(self) -> None:
        raise CheckpointError("the skeleton of an imported checkpoint does not compute.")

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, stored in self.stored.items():
                getattr(self, name).copy_(stored.weight())


def build_skeleton(content: Content) -> SkeletonModule:
    """Modules on the meta device with the parameters and buffers of `content` under their names."""
    root = SkeletonModule()
    for name, stored in content.parameters.items():
        module, own = _descend(root, name)
        value = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        trained = bool(content.groups) and any(name in group.names for group in content.groups)
        module.register_parameter(own, nn.Parameter(value, requires_grad=trained))
        module.stored[own] = stored
    for name, target in content.aliases.items():
        if target in content.parameters:
            module, own = _descend(root, name)
            module.register_parameter(own, root.get_parameter(target))
    for name, buffer in content.buffers.items():
        module, own = _descend(root, name)
        module.register_buffer(own, buffer.clone())
    _list_blocks(root)
    return root


def _descend(root: SkeletonModule, name: str) -> tuple[SkeletonModule, str]:
    *path, own = name.split(".")
    module = root
    for step in path:
        if step not in module._modules:
            module.add_module(step, SkeletonModule())
        module = module._modules[step]  # type: ignore[assignment]
    return module, own


def _list_blocks(module: nn.Module) -> None:
    """Makes numbered children a list, so that they are found as repeated blocks."""
    for name, child in list(module._modules.items()):
        assert child is not None
        _list_blocks(child)
        numbered = list(child._modules) == [str(i) for i in range(len(child._modules))]
        if child._modules and numbered and not child._parameters and not child._buffers:
            module._modules[name] = nn.ModuleList(child._modules.values())  # type: ignore[arg-type]


class _StoredStates(dict):  # type: ignore[type-arg]
    """The optimizer's states before `shard`, each read as it is taken."""

    def __init__(self, stored: Mapping[nn.Parameter, StoredParameter]) -> None:
        super().__init__(dict.fromkeys(stored))
        self._stored = stored

    def pop(self, parameter: Any, default: Any = None) -> Any:
        stored = self._stored.get(parameter)
        if stored is None or not stored.moments:
            return default
        held: dict[str, torch.Tensor] = {name: read().float() for name, read in stored.moments.items()}
        # Some optimizers keep no step count. If they have states, the next update is not the first.
        if stored.steps:
            held["step"] = torch.tensor(float(stored.steps), dtype=torch.float32, device="cpu")
        return held


class LionStates(torch.optim.Optimizer):
    """Only its states are placed: one moment per parameter."""

    unbounded_rule = "lion"

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


_KINDS: dict[frozenset[str], tuple[Any, dict[str, Any]]] = {
    frozenset({"exp_avg", "exp_avg_sq"}): (torch.optim.AdamW, {}),
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): (torch.optim.AdamW, {"amsgrad": True}),
    frozenset({"exp_avg"}): (LionStates, {}),
    frozenset({"momentum_buffer"}): (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    frozenset({"sum"}): (torch.optim.Adagrad, {}),
    frozenset({"square_avg"}): (torch.optim.RMSprop, {}),
    frozenset(): (torch.optim.SGD, {"lr": 0.1}),
}


_FACTORS = frozenset({"row_var", "col_var", "variance"})


def _build_optimizers(model: nn.Module, content: Content) -> list[torch.optim.Optimizer]:
    """The optimizer whose states these are; several if groups have those of different ones, such as Muon and AdamW."""
    runs: list[tuple[tuple[Any, dict[str, Any]], list[StoredGroup]]] = []
    for group in content.groups:
        kind = _kind_of(group, content)
        if runs and runs[-1][0][0] is kind[0]:
            runs[-1][0][1].update(kind[1])
            runs[-1][1].append(group)
        else:
            runs.append(((kind[0], dict(kind[1])), [group]))
    trained = {model.get_parameter(name): stored for name, stored in content.parameters.items() if stored.moments}
    found = []
    for (make, options), groups in runs:
        defaults = make([nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))], **options).defaults
        optimizer = make([{"params": list(_members(model, g)), **_known(g, defaults)} for g in groups], **options)
        optimizer.state = _StoredStates(trained)
        found.append(optimizer)
    return found


def _kind_of(group: StoredGroup, content: Content) -> tuple[Any, dict[str, Any]]:
    """The optimizer of a group, by its states; a group without states gets that of the others."""
    everything = [stored.moments for stored in content.parameters.values()]
    own = [content.parameters[name].moments for name in group.names if name in content.parameters]
    names: frozenset[str] = frozenset().union(*own) or frozenset().union(*everything)
    if names and names <= _FACTORS:
        return torch.optim.Adafactor, {}
    if "ns_steps" in group.options:
        return torch.optim.Muon, {}
    if names not in _KINDS:
        raise CheckpointError(
            f"the states {', '.join(sorted(names))} do not belong to any optimizer that can be sharded."
        )
    return _KINDS[names]


def _members(model: nn.Module, group: StoredGroup) -> Iterator[nn.Parameter]:
    yield from dict.fromkeys(model.get_parameter(name) for name in group.names)


def _known(group: StoredGroup, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that torch's optimizer also has, without the switches of fused kernels."""
    return {key: value for key, value in group.options.items() if key in {*defaults, "initial_lr"} and key != "fused"}


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The other values in it that our checkpoint can hold."""
    found = {}
    for key, value in extra.items():
        try:
            encode(value, key, lambda tensor: "")
        except UnsavableError:
            continue
        found[key] = value
    return found
