"""A folder of torch's distributed checkpoint (DCP), as FSDP2 scripts save it.

The keys are found by their form: optimizer states are `...state.NAME.MOMENT`, the weight of NAME is that key after some
prefix (`model.NAME`, `app.model.NAME`), options are `...param_groups`. Only states that are keyed by the parameters'
names can be read: those of `torch.distributed.checkpoint.state_dict.get_state_dict`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.foreign.content import Content, StoredGroup, StoredParameter
from unbounded.checkpoint.foreign.pickles import MetadataUnpickler, load_tensors
from unbounded.errors import CheckpointError

_MOMENTS = "exp_avg|exp_avg_sq|momentum_buffer|sum|square_avg|max_exp_avg_sq|row_var|col_var|variance|step"
_STATE = re.compile(rf"(?:^|.*?\.)state\.(.+)\.({_MOMENTS})")
_GROUPS = re.compile(r"(?:^|.*?\.)param_groups(?:\.(.+)\.([^.]+))?")
_PREFIXES = ("app.model.", "model.", "module.", "model_state_dict.", "state_dict.", "")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_distributed(folder: Path) -> bool:
    return (folder / ".metadata").is_file()


def read_distributed(folder: Path) -> Content:
    """The content of a distributed checkpoint; each tensor is assembled from its chunks when it is read."""
    items = _Items(folder)
    moments: dict[str, dict[str, str]] = {}
    for key in items.keys:
        match = _STATE.fullmatch(key)
        if match is not None:
            moments.setdefault(match.group(1), {})[match.group(2)] = key
    if any(name.isdigit() for name in moments):
        raise CheckpointError(
            f"the optimizer states in {folder} are keyed by number, so their parameters are not known. Save them with "
            "torch.distributed.checkpoint.state_dict.get_state_dict, which names them."
        )
    rest = [key for key in items.tensors if not _STATE.fullmatch(key) and not _GROUPS.fullmatch(key)]
    prefix = _model_prefix(rest, list(moments))
    weights = {key.removeprefix(prefix): key for key in rest if key.startswith(prefix)}
    aliases = _find_aliases(items, weights, moments) if moments else {}
    buffers = {name: items.read(key) for name, key in weights.items() if _is_buffer(name, items.dtype(key))}
    parameters = {
        name: _parameter(items, key, moments.get(name, {}))
        for name, key in weights.items()
        if name not in aliases and name not in buffers
    }
    return Content("torch distributed checkpoint", parameters, buffers, _read_groups(items, [*moments]), aliases, {})


class _Items:
    """The metadata of a folder, by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with open(folder / ".metadata", "rb") as file:
            metadata = MetadataUnpickler(file, folder / ".metadata").load()
        self.keys: Mapping[str, Any] = metadata.state_dict_metadata
        self.tensors = [key for key, about in self.keys.items() if hasattr(about, "chunks")]
        self._places = {(index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.keys[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.keys[key].properties.dtype  # type: ignore[no-any-return]

    def read(self, key: str) -> torch.Tensor:
        whole = torch.empty(self.shape(key), dtype=self.dtype(key), device="cpu")
        for chunk in self.keys[key].chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self._load(key, tuple(chunk.offsets)).view(tuple(chunk.sizes))
        return whole

    def value(self, key: str) -> Any:
        """What is stored at `key`, a tensor or plain values."""
        return self.read(key) if key in self.tensors else self._load(key, ())

    def _load(self, key: str, offsets: tuple[int, ...]) -> Any:
        place = self._places[key, offsets]
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{key} in {self.folder} is compressed or encrypted. Save it without extensions.")
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return load_tensors(io.BytesIO(file.read(place.length)))


def _model_prefix(keys: list[str], trained: list[str]) -> str:
    """The prefix of the names of the model's tensors."""
    known = set(keys)
    for prefix in _PREFIXES:
        if all(prefix + name in known for name in trained) and any(key.startswith(prefix) for key in keys):
            return prefix
    raise CheckpointError(
        f"the weights of {trained[0]} and {len(trained) - 1} others are not in the checkpoint, but their states are. "
        'Save both: dcp.save({"model": ..., "optimizer": ...}).'
    )


def _parameter(items: _Items, key: str, moments: Mapping[str, str]) -> StoredParameter:
    steps = int(items.value(moments["step"])) if "step" in moments else 0
    reads = {name: partial(items.read, place) for name, place in moments.items() if name != "step"}
    return StoredParameter(items.shape(key), items.dtype(key), partial(items.read, key), reads, steps)


def _is_buffer(name: str, dtype: torch.dtype) -> bool:
    return name.rpartition(".")[2] in _BUFFERS or not (dtype.is_floating_point or dtype.is_complex)


def _find_aliases(items: _Items, weights: Mapping[str, str], trained: Mapping[str, Any]) -> dict[str, str]:
    """Tied weights are stored under each of their names, but have states under one."""
    found = {}
    for name, key in weights.items():
        if name in trained:
            continue
        same = [other for other in trained if items.shape(weights[other]) == items.shape(key)]
        twin = next((other for other in same if torch.equal(items.read(weights[other]), items.read(key))), None)
        if twin is not None:
            found[name] = twin
    return found


def _read_groups(items: _Items, trained: list[str]) -> list[StoredGroup]:
    """The param groups: stored as one list, or as one entry per option and group, or per option and parameter."""
    options: dict[str, dict[str, Any]] = {}
    for key in items.keys:
        match = _GROUPS.fullmatch(key)
        if match is None:
            continue
        owner, option = match.groups()
        if owner is None:
            options |= {str(index): dict(group) for index, group in enumerate(items.value(key))}
        else:
            options.setdefault(owner, {})[option] = items.value(key)
    grouped: dict[str, StoredGroup] = {}
    for owner, own in options.items():
        names = own.pop("params", [owner])
        key = repr(sorted(own.items(), key=lambda item: item[0])) if names == [owner] else owner
        grouped[key] = StoredGroup([*(grouped[key].names if key in grouped else ()), *names], own)
    return list(grouped.values()) or ([StoredGroup(trained, {})] if trained else [])
