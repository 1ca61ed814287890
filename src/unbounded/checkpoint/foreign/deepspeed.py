"""A DeepSpeed ZeRO-3 checkpoint folder.

    latest                                            the tag, and so the subfolder
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt     names and shapes in order, buffers, frozen fragments
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's part of masters and moments, flat

Rank R holds the R-th part of every parameter, each part padded to the same length, one parameter after another in the
order of the shapes; the flat tensors are cut into sub-groups that follow one another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.foreign.content import Content, StoredGroup, StoredParameter
from unbounded.checkpoint.foreign.pickles import load_tensors
from unbounded.errors import CheckpointError

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_STRUCTURE = {
    *("module", "optimizer", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "mp_world_size", "checkpoint_parallel_dimensions"),
    "ds_config",
}
"""Keys of a checkpoint besides its counters, its schedule and the script's own `client_state`."""


def is_deepspeed(folder: Path) -> bool:
    return bool(_tag_folder(folder))


def _tag_folder(folder: Path) -> Path | None:
    latest = folder / "latest"
    inner = folder / latest.read_text().strip() if latest.is_file() else folder
    return inner if any(inner.glob("*_model_states.pt")) else None


def read_deepspeed(folder: Path) -> Content:
    """The content of a ZeRO-3 checkpoint; the large tensors stay in their files until they are read."""
    inner = _tag_folder(folder)
    assert inner is not None
    models, optims = _load(inner, "model"), _load(inner, "optim")
    zero = [optim["optimizer_state_dict"] for optim in optims]
    _check(inner, models, zero)
    shapes = [dict(shapes) for shapes in models[0]["param_shapes"]]
    masters = [list(part["fp32_flat_groups"]) for part in zero]
    inside = [part["optimizer_state_dict"] for part in zero]
    parameters = dict(_trained(shapes, masters, [part["state"] for part in inside]))
    parameters |= _frozen(models)
    buffers = {name: models[0]["module"][name] for name in models[0]["buffer_names"]}
    groups = [
        StoredGroup(list(named), {key: value for key, value in group.items() if key != "params"})
        for named, group in zip(shapes, inside[0]["param_groups"], strict=True)
    ]
    extra = {key: value for key, value in models[0].items() if key not in _STRUCTURE}
    return Content(
        f"DeepSpeed ZeRO-3 checkpoint of {len(models)} ranks",
        parameters,
        buffers,
        groups,
        dict(models[0].get("shared_params") or {}),
        extra,
    )


def _load(folder: Path, kind: str) -> list[Any]:
    """The files of one kind by rank."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*_{kind}_states.pt")):
        match = _RANK.fullmatch(path.name)
        if match is None or match.group(2) != "00":
            raise CheckpointError(
                f"{path} is not part of a ZeRO-3 checkpoint without model parallelism. For stages 1 and 2 and for "
                "model-parallel jobs, convert the weights with DeepSpeed's zero_to_fp32.py and load those."
            )
        found[int(match.group(1))] = path
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(f"{folder} has the *_{kind}_states.pt of ranks {sorted(found)}. Copy the missing ones.")
    return [load_tensors(found[rank], mmap=True) for rank in sorted(found)]


def _check(folder: Path, models: Sequence[Any], zero: Sequence[Any]) -> None:
    stage, count = int(zero[0].get("zero_stage", 0)), zero[0].get("partition_count")
    if stage != 3 or "fp32_flat_groups" not in zero[0]:
        raise CheckpointError(
            f"{folder} is of ZeRO stage {stage}, but only stage 3 can be read. Convert its weights instead."
        )
    count = max(count) if isinstance(count, list) else count
    if count != len(zero) or len(models) != len(zero):
        raise CheckpointError(
            f"{folder} was saved by {count} ranks and has the optimizer states of {len(zero)} and the model states of "
            f"{len(models)}. Copy the missing files."
        )


def _trained(
    shapes: Sequence[Mapping[str, Any]], masters: Sequence[list[torch.Tensor]], states: Sequence[Mapping[int, Any]]
) -> Iterator[tuple[str, StoredParameter]]:
    """Every trained parameter, in the order in which the flat tensors hold them."""
    size, first = len(masters), states[0]
    names = [name for name, value in first[0].items() if _is_flat(value, masters[0][0])] if first else []
    flats: dict[str, list[list[torch.Tensor]]] = {
        name: [[state[index][name] for index in sorted(state)] for state in states] for name in names
    }
    steps = int(max((state.get("step", 0) for state in first.values()), default=0))
    offset = 0
    for name, shape in ((name, tuple(shape)) for group in shapes for name, shape in group.items()):
        numel = math.prod(shape)
        length = -(-numel // size)

        def read(parts: Sequence[list[torch.Tensor]], shape: tuple[int, ...], start: int, length: int) -> torch.Tensor:
            whole = torch.cat([_stretch(flat, start, length) for flat in parts])
            return whole[: math.prod(shape)].view(shape)

        place = {"shape": shape, "start": offset, "length": length}
        moments = {moment: partial(read, parts, **place) for moment, parts in flats.items()}
        yield name, StoredParameter(shape, torch.float32, partial(read, masters, **place), moments, steps)
        offset += length
    held = sum(flat.numel() for flat in masters[0])
    if offset != held:
        raise CheckpointError(
            f"the shapes need {offset} elements of each rank, but its flat tensors hold {held}. Copy the files again."
        )


def _is_flat(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape


def _stretch(flats: Sequence[torch.Tensor], start: int, length: int) -> torch.Tensor:
    """Elements [start, start + length) of tensors that follow one another."""
    parts, position = [], 0
    for flat in flats:
        first, last = max(start - position, 0), min(start + length - position, flat.numel())
        if first < last:
            parts.append(flat[first:last])
        position += flat.numel()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _frozen(models: Sequence[Any]) -> dict[str, StoredParameter]:
    shapes = models[0].get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name] for model in models]

        def read(parts: Sequence[torch.Tensor] = parts, shape: Any = shape) -> torch.Tensor:
            return torch.cat([part.flatten() for part in parts])[: math.prod(shape)].view(tuple(shape))

        found[name] = StoredParameter(tuple(shape), parts[0].dtype, read)
    return found
