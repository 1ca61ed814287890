"""Checks what a manifest says besides tensors and files; `parsing` says why."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from unbounded.checkpoint.format.field_checks import boolean, integer, items, mapping, number, text, texts
from unbounded.checkpoint.format.manifest import Manifest
from unbounded.ranks.mesh import ORDER
from unbounded.zero.step.loss_scale import LossScale

MAX_STEPS = 2**53
_TEXTS = ("library", "saved_at", "plan", "precision", "model")


def check_values(manifest: Manifest) -> None:
    """Raises a ValueError if a value that loading, exporting or showing relies on is not valid."""
    values = manifest.values
    for name in _TEXTS:
        text(values.get(name), name)
    for name in ("config", "generation_config"):
        if name in values:
            text(values[name], name)
    world_size = integer(values.get("world_size"), "world_size", 1, 1 << 24)
    for axis, size in mapping(values.get("mesh", {}), "mesh").items():
        integer(size, f"the size of the axis {axis[:20]}", 1, world_size)
    if "places" in values:
        _check_places(values["places"], world_size)
    for name, entry in mapping(values.get("parameters"), "parameters").items():
        _check_parameter(mapping(entry, name[:100]), name[:100])
    extra = mapping(values.get("extra"), "extra")
    if "0" not in extra or any(not rank.isascii() or not rank.isdigit() for rank in extra):
        raise ValueError("extra has no values for rank 0, or values for a rank that does not exist")
    for rank, held in extra.items():
        mapping(held, f"extra of rank {rank[:10]}")
    if len(items(values.get("random"), "random")) > world_size:
        raise ValueError("it has random states of more ranks than the job had")
    texts(values.get("used"), "used")
    _check_adapters(values.get("adapters", {}))
    if values.get("optimizer", False) is not None:
        _check_optimizer(mapping(values.get("optimizer"), "optimizer"))


def _check_places(places: Any, world_size: int) -> None:
    """Every rank has one on each axis."""
    if len(items(places, "places")) != world_size:
        raise ValueError(f"it has places of {len(places)} ranks, but the job had {world_size}")
    for place in places:
        if len(items(place, "a rank's place")) != len(ORDER):
            raise ValueError(f"a rank has places on {len(place)} axes, but there are {len(ORDER)}")
        for position in place:
            integer(position, "a rank's place on an axis", 0, world_size - 1)


def _check_parameter(entry: dict[str, Any], name: str) -> None:
    for size in items(entry.get("shape"), f"the shape of {name}"):
        integer(size, f"the shape of {name}", 0, 2**62)
    boolean(entry.get("trainable"), f"trainable of {name}")
    texts(entry.get("aliases", []), f"the aliases of {name}")
    integer(entry.get("step", 0), f"the step of {name}", 0, MAX_STEPS)
    mapping(entry.get("scalars", {}), f"the scalars of {name}")


def _check_optimizer(saved: dict[str, Any]) -> None:
    text(saved.get("kind"), "optimizer.kind")
    for index, group in enumerate(items(saved.get("groups"), "optimizer.groups")):
        where = f"optimizer.groups[{index}]"
        texts(mapping(group, where).get("names"), f"{where}.names")
        if "params" in mapping(group.get("options"), f"{where}.options"):
            raise ValueError(f"{where}.options has parameters")
    integer(saved.get("skipped_steps"), "optimizer.skipped_steps", 0, MAX_STEPS)
    boolean(saved.get("scaled"), "optimizer.scaled")
    if "clip" not in saved:
        raise ValueError("optimizer.clip is missing")
    scale = saved.get("loss_scale", False)
    if scale is not None:
        known = {field.name for field in fields(LossScale)}
        if set(mapping(scale, "optimizer.loss_scale")) != known:
            raise ValueError("optimizer.loss_scale has other fields")
        for name, value in scale.items():
            if not 0 <= number(value, f"optimizer.loss_scale.{name}") <= 2.0**64:
                raise ValueError(f"optimizer.loss_scale.{name} is {value}")


def _check_adapters(adapters: Any) -> None:
    """Their names become folders of an export, so they may not point anywhere else."""
    for name, about in mapping(adapters, "adapters").items():
        if not name or name in (".", "..") or "/" in name or "\0" in name or len(name) > 200:
            raise ValueError(f"an adapter is named {name[:60]!r}, which cannot be a folder")
        held = mapping(about, "adapters")
        mapping(held.get("config"), f"the configuration of the adapter {name}")
        if held.get("tensors") is not None:
            for key, tensor in mapping(held["tensors"], f"the tensors of the adapter {name}").items():
                text(tensor, f"{key[:100]} of the adapter {name}")
