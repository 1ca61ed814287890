"""How a checkpoint differs from the model and the optimizer it is to be loaded into: a list of facts, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from unbounded.checkpoint.manifest import Manifest
from unbounded.checkpoint.snapshot import BUFFER, UNREDUCED, WEIGHT, persistent_buffers
from unbounded.checkpoint.targets import Source, wanted_groups
from unbounded.errors import CheckpointError
from unbounded.sharding import Sharded
from unbounded.zero.layout import Slot
from unbounded.zero.unit import Unit
from unbounded.zero.units import find_members

SHOWN = 8


def refuse(found: Sequence[str], folder: Path, manifest: Manifest) -> None:
    """Raises with what was found, if anything."""
    if found:
        shown = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        raise CheckpointError(
            f"the checkpoint in {folder} (of a {manifest.values['model']}) does not fit: {shown}. "
            "Build the model and the optimizer that it was saved from."
        )


def of_model(model: nn.Module, units: Sequence[Unit], source: Source) -> list[str]:
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
    found += [f"{name} is in the checkpoint and not in the model" for name in stored if name not in met]
    return found + _of_buffers(model, source.manifest)


def _of_parameter(unit: Unit, slot: Slot, source: Source) -> list[str]:
    shape = tuple(source.manifest.values["parameters"][source.names[slot.name]]["shape"])
    if shape != slot.shape:
        return [f"{slot.name} has the shape {list(slot.shape)} here and {list(shape)} there"]
    entry = source.entry(WEIGHT, slot.name)
    if entry is None:
        return [f"the checkpoint has no weights of {slot.name}"]
    if entry.dtype != unit.dtype and not (entry.dtype.is_floating_point and unit.dtype.is_floating_point):
        return [f"{slot.name} is {unit.dtype} here and {entry.dtype} there"]
    gap = source.runs(WEIGHT, slot.name).first_gap()
    return [] if gap is None else [f"the checkpoint lacks element {gap} of {slot.name}"]


def _of_buffers(model: nn.Module, manifest: Manifest) -> list[str]:
    stored = {entry.name: entry for entry in manifest.of_kind(BUFFER) if entry.rank is None}
    here, found = persistent_buffers(model), []
    for name, buffer in here.items():
        if name not in stored:
            found.append(f"the buffer {name} is not in the checkpoint")
        elif stored[name].shape != tuple(buffer.shape):
            shapes = f"{list(buffer.shape)} here and {list(stored[name].shape)} there"
            found.append(f"the buffer {name} has the shape {shapes}")
    return found + [f"the buffer {name} is not in the model" for name in stored if name not in here]


def of_optimizer(model: nn.Module, state: Sharded, source: Source, size: int) -> list[str]:
    """Param groups of other sizes, states that the checkpoint lacks, gradients that fit only its number of ranks."""
    manifest, optimizer = source.manifest, state.optimizer
    saved = manifest.values["optimizer"]
    if saved is None:
        return ["it was saved without an optimizer (load it without one)"]
    assert optimizer is not None
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["names"]) for group in saved["groups"]]
    found = []
    if here != there:
        found.append(f"the param groups have {here} parameters here and {there} there")
    for unit in state.engine.units:
        rule = state.rules.get(unit.dtype) if unit.trainable else None
        for group in wanted_groups(unit, rule, with_states=True)[1:]:
            found += [
                f"it has no {group[0]} of {slot.name} (saved from {saved['kind']}, here {optimizer.kind})"
                for slot in unit.layout.slots
                if source.entry(group[0], slot.name) is None
            ]
    if manifest.of_kind(UNREDUCED) and manifest.values["world_size"] != size:
        found.append(
            f"it was saved by {manifest.values['world_size']} ranks between backwards, with gradients that were not "
            f"reduced yet, and here are {size}"
        )
    return found
