"""How a checkpoint differs from the model and the optimizer that load it: a list of facts, or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.format.manifest import BUFFER, GRADIENT, LOOSE, UNREDUCED, WEIGHT, Manifest
from unbounded.checkpoint.load.counterpart import find_counterpart
from unbounded.checkpoint.load.load_plan import StoredTensors, wanted_groups
from unbounded.errors import CheckpointError
from unbounded.optim.formats import MASTER_STATES
from unbounded.zero.layout import Slot
from unbounded.zero.members import find_members, persistent_buffers
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.unit import Unit

SHOWN = 8


def refuse(found: Sequence[str], folder: Path, manifest: Manifest) -> None:
    """Raises with what was found, if anything."""
    if found:
        shown = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        raise CheckpointError(
            f"the checkpoint in {folder} (of a {manifest.values['model']}) does not fit: {shown}. "
            "Build the model and the optimizer that it was saved from."
        )


def of_model(model: nn.Module, units: Sequence[Unit], source: StoredTensors, *, elsewhere: bool = False) -> list[str]:
    """Parameters and buffers that are missing, unknown, of another shape or dtype, or with holes."""
    aliases = {member.names[0]: member.names[1:] for member in find_members(model)}
    found, met = [], set()
    for unit in units:
        for slot in unit.layout.slots:
            known = next((name for name in (slot.name, *aliases.get(slot.name, ())) if name in source.names), None)
            if known is None:
                found.append(f"{slot.name} is not in the checkpoint")
                continue
            source.names.setdefault(slot.name, source.names[known])
            met.add(source.names[known])
            found += _of_parameter(unit, slot, source)
    stored = source.manifest.values["parameters"]
    if elsewhere:  # other stages of a pipeline have the rest
        return found + _of_buffers(model, source.manifest)
    found += [f"{name} is in the checkpoint but not in the model" for name in stored if name not in met]
    return found + _of_buffers(model, source.manifest)


def _of_parameter(unit: Unit, slot: Slot, source: StoredTensors) -> list[str]:
    shape = tuple(source.manifest.values["parameters"][source.names[slot.name]]["shape"])
    if shape != slot.global_shape:
        return [f"{slot.name} has the shape {list(slot.global_shape)} here and {list(shape)} in the checkpoint"]
    entry = source.entry(WEIGHT, slot.name)
    if entry is None:
        return [f"the checkpoint has no weights of {slot.name}"]
    if entry.dtype != unit.dtype and not (entry.dtype.is_floating_point and unit.dtype.is_floating_point):
        return [f"{slot.name} is {unit.dtype} here and {entry.dtype} in the checkpoint"]
    return []


def _of_buffers(model: nn.Module, manifest: Manifest) -> list[str]:
    stored = {entry.name: entry for entry in manifest.of_kind(BUFFER) if entry.rank is None}
    here, found = persistent_buffers(model), []
    for name, buffer in here.items():
        if name not in stored:
            found.append(f"the buffer {name} is not in the checkpoint")
        elif stored[name].shape != tuple(buffer.shape):
            shapes = f"{list(buffer.shape)} here and {list(stored[name].shape)} in the checkpoint"
            found.append(f"the buffer {name} has the shape {shapes}")
    return found + [f"the buffer {name} is not in the model" for name in stored if name not in here]


def of_optimizer(model: nn.Module, state: Sharded, source: StoredTensors, size: int) -> list[str]:
    """Another kind of optimizer, other param groups or states, or gradients for another number of ranks."""
    manifest, optimizer = source.manifest, state.optimizer
    saved = manifest.values["optimizer"]
    if saved is None:
        return ["it was saved without an optimizer (load it without one)"]
    assert optimizer is not None
    found = []
    if saved["kind"] != optimizer.kind:
        found.append(f"it was saved from {saved['kind']}, but the optimizer here is {optimizer.kind}")
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["names"]) for group in saved["groups"]]
    if here != there and state.engine.axes.pipeline.size == 1:
        found.append(f"the param groups have {here} parameters here and {there} in the checkpoint")
    else:
        found += _of_groups(model, optimizer.param_groups, saved["groups"])
    found += _of_states(state, source)
    if not state.plan.keeps_gradients and (manifest.of_kind(GRADIENT) or manifest.of_kind(UNREDUCED)):
        found.append('it was saved with gradients that no step had used, and the plan here says gradients="none"')
    axes = state.engine.axes
    if manifest.of_kind(UNREDUCED) and not find_counterpart(manifest.values, axes).is_itself:
        mesh = manifest.values.get("mesh", axes.sizes)
        order = ", with other ranks at its places" if mesh == axes.sizes else ""
        found.append(
            f"it was saved by {manifest.values['world_size']} ranks between backwards, with gradients that were not "
            f"reduced yet, but here there are {size} (the mesh was {mesh} and is {axes.sizes} here{order})"
        )
    return found


def _of_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters that would be trained with the options of another group."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for index, (group, saved) in enumerate(zip(groups, stored, strict=True)):
        held = set(saved["names"])
        here = [known for p in group["params"] if (known := names.get(id(p), [])) and held.isdisjoint(known)]
        if here:
            shown = _shown([known[0] for known in here])
            found.append(f"param group {index} has {shown} here, which are in another group in the checkpoint")
    return found


def _of_states(state: Sharded, source: StoredTensors) -> list[str]:
    """States that the optimizer keeps but the checkpoint lacks, and the other way round (amsgrad, momentum)."""
    saved, optimizer = source.manifest.values["optimizer"], state.optimizer
    assert optimizer is not None
    wanted: set[str] = set()
    lacking: dict[str, list[str]] = {}
    unlike: dict[str, list[str]] = {}
    for unit in state.engine.units:
        for group in wanted_groups(unit, with_states=True)[1:]:
            wanted.add(group[0])
            for slot in unit.layout.slots:
                if not _is_there(source, group[0], slot.name, math.prod(slot.global_shape)):
                    lacking.setdefault(group[0], []).append(slot.name)
        for slot in unit.layout.slots:
            for name, shape in unit.rule.factor_shapes(slot.shape).items() if unit.rule is not None else ():
                wanted.add(name)
                dtype = torch.promote_types(unit.dtype, torch.float32)
                if not _is_there(source, name, slot.name, math.prod(shape)):
                    lacking.setdefault(name, []).append(slot.name)
                elif (entry := source.entry(name, slot.name)) is not None and entry.dtype != dtype:
                    unlike.setdefault(f"{dtype} here and {entry.dtype} in the checkpoint", []).append(slot.name)
    kinds = {entry.kind for entry in source.manifest.tensors.values()} - _NOT_MOMENTS
    names = [slot.name for unit in state.engine.units for slot in unit.layout.slots]  # a pipeline's ranks have some
    kinds = {kind for kind in kinds if any(source.entry(kind, name) is not None for name in names)}
    dropped = sorted(kind for kind in kinds - wanted if not kind.endswith("_scale"))
    saved_from = f"(saved from {saved['kind']}, here {optimizer.kind})"
    found = [f"it has no {kind} of {_shown(names)} {saved_from}" for kind, names in lacking.items()]
    found += [f"the factored states of {_shown(list(dict.fromkeys(n)))} are {dtypes}" for dtypes, n in unlike.items()]
    found += [f"it has {kind}, which the optimizer here does not keep {saved_from}" for kind in dropped]
    if frozen := _frozen_here(state, source, kinds):
        found.append(f"it has states of {_shown(frozen)}, frozen here (call requires_grad_() on them before loading)")
    return found + (_of_flags(state, source) if found else [])


def _is_there(source: StoredTensors, kind: str, name: str, numel: int) -> bool:
    """Whether there is such a state of that size."""
    entry = source.entry(kind, name)
    return entry is not None and math.prod(entry.shape) == numel


def _frozen_here(state: Sharded, source: StoredTensors, kinds: Iterable[str]) -> list[str]:
    """The parameters that were updated before the save but are frozen here, so they have no states."""
    described = source.manifest.values["parameters"]
    names = [slot.name for unit in state.engine.units if not unit.trainable for slot in unit.layout.slots]
    updated = [name for name in names if described[source.names[name]].get("step")]
    return [name for name in updated if any(source.entry(kind, name) is not None for kind in kinds)]


def _of_flags(state: Sharded, source: StoredTensors) -> list[str]:
    """The differing switches of param groups that decide which states there are."""
    optimizer = state.optimizer
    assert optimizer is not None
    found = []
    for group, stored in zip(optimizer.param_groups, source.manifest.values["optimizer"]["groups"], strict=False):
        for key, value in stored["options"].items():
            if key in _SWITCHES and key in group and group[key] != value:
                found.append(f"{key} is {group[key]!r} here and {value!r} in the checkpoint")
    return list(dict.fromkeys(found))


_SWITCHES = ("amsgrad", "centered", "momentum")
_NOT_MOMENTS = {WEIGHT, BUFFER, GRADIENT, UNREDUCED, LOOSE, *MASTER_STATES}


def check_options(options: Any, group: Mapping[str, Any], index: int, folder: Path) -> None:
    """Raises if hyper-parameters are not of the kind that the optimizer here has."""
    named = isinstance(options, dict) and all(isinstance(key, str) for key in options)
    known = set(options) & set(group) if named else set()
    wrong = sorted(key for key in known if not _is_alike(group[key], options[key]))
    if not named or wrong:
        what = f"{_shown(wrong)} of another kind than here" if named else "no names"
        raise CheckpointError(
            f"param group {index} of the checkpoint in {folder} has {what}. Load another checkpoint, or this one "
            "without the optimizer."
        )


def _is_alike(here: Any, there: Any) -> bool:
    """Whether one may replace the other: numbers of any kind, sequences of the same length, the same type."""
    if here is None or there is None:
        return True
    if _is_number(here):
        return _is_number(there)
    if isinstance(here, tuple | list):
        return isinstance(there, tuple | list) and len(here) == len(there) and all(map(_is_alike, here, there))
    return type(here) is type(there)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
