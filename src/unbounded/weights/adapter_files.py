"""Adapters as peft keeps them in files: which tensors of the model, under which names, with which configuration.

peft itself is asked, with stand-ins for the tensors, so nothing has to be read or gathered. The answer is plain data:
it goes into a checkpoint's manifest, from which adapters can be exported without the model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.errors import CheckpointError
from unbounded.weights.recipes import Recipe, read_recipe
from unbounded.weights.safetensors_reader import ADAPTER_WEIGHTS, WeightFolder
from unbounded.zero.members import find_members, persistent_buffers
from unbounded.zero.setup.meta import shown

ADAPTER_CONFIG = "adapter_config.json"


def describe_adapters(model: nn.Module) -> dict[str, Any]:
    """For every adapter of a peft model its configuration, and the model's name of every tensor in its file.

    `tensors` is None if peft computes what it saves, as it does for prompts. Without peft there are no adapters.
    """
    configs = getattr(model, "peft_config", None)
    if "peft" not in sys.modules or not isinstance(configs, Mapping):
        return {}
    return {
        adapter: {"config": _describe_config(model, config), "tensors": _find_tensors(model, adapter, config)}
        for adapter, config in configs.items()
    }


def _find_tensors(model: nn.Module, adapter: str, config: Any) -> dict[str, str] | None:
    from peft import PeftModel, get_peft_model_state_dict

    if config.is_prompt_learning:
        return None
    first = {name: member.names[0] for member in find_members(model) for name in member.names}
    buffers = persistent_buffers(model, every_name=True)
    known: dict[int, str] = {}
    for name, buffer in buffers.items():  # VeRA's projections are in every layer, and once more at the top
        first[name] = known.setdefault(id(buffer), name)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    stand_ins = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
    names = {id(stand_in): first.get(name, name) for name, stand_in in stand_ins.items()}
    parameters = {id(p): stand_ins[n] for n, p in model.named_parameters()}
    with shown(list(model.modules()), parameters):  # peft also asks modules for what they hold
        saved = get_peft_model_state_dict(model, stand_ins, adapter, save_embedding_layers=False)
    if any(id(value) not in names for value in saved.values()):
        return None
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    return {prefix + key: names[id(value)] for key, value in saved.items()}


def _describe_config(model: Any, config: Any) -> dict[str, Any]:
    """The configuration as peft writes it for whoever loads the adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = config.to_dict() | {"inference_mode": True}
    found["base_model_name_or_path"] = found.get("base_model_name_or_path") or getattr(base, "name_or_path", None)
    if found.get("task_type") is None:
        found["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return json.loads(json.dumps(found, default=_plain))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def adapter_folder(target: Path, adapter: str) -> Path:
    """Where an adapter is in a folder of adapters; peft's default one is at the top."""
    return target if adapter == "default" else target / adapter


def file_names(adapter: str, about: Mapping[str, Any]) -> dict[str, list[str]]:
    """The name of a tensor of the model in the adapter's file; a tied one may be there twice."""
    if about["tensors"] is None:
        raise CheckpointError(
            f"the adapter {adapter!r} ({about['config'].get('peft_type')}) is not stored as it is trained: peft "
            "computes what it saves. Call `model.save_pretrained(folder)` inside `with unbounded.full_params(model):`."
        )
    found: dict[str, list[str]] = {}
    for key, name in about["tensors"].items():
        found.setdefault(name, []).append(key)
    return found


def base_folder(folder: Path) -> Path:
    """The folder itself or, if it holds only adapters, the folder of their base model."""
    config = folder / ADAPTER_CONFIG
    if not config.is_file() or any(path.name != ADAPTER_WEIGHTS for path in folder.glob("*.safetensors")):
        return folder
    name = json.loads(config.read_text()).get("base_model_name_or_path")
    if not name or not Path(name).is_dir():
        raise CheckpointError(
            f"{folder} holds adapters for the base model {name!r}, which is not a folder here. "
            f"Write its folder into {config}, or give the base model's folder."
        )
    return Path(name)


def read_adapters(folder: Path, model: nn.Module) -> dict[str, Recipe]:
    """The recipes of the adapters' tensors in a folder of adapters, by the model's names."""
    found: dict[str, Recipe] = {}
    for adapter, about in describe_adapters(model).items():
        place = adapter_folder(folder, adapter)
        if (place / ADAPTER_WEIGHTS).is_file():
            weights = WeightFolder(place, only=ADAPTER_WEIGHTS)
            names = file_names(adapter, about)
            found |= {n: read_recipe(weights, keys[0]) for n, keys in names.items() if keys[0] in weights.places}
            lacking = [keys[0] for keys in names.values() if keys[0] not in weights.places]
            more = sorted(set(weights.places) - set(about["tensors"]))
            if lacking or more:
                raise CheckpointError(
                    f"the adapter in {place} is not the model's {adapter!r}: it lacks {_shown(lacking)} and has "
                    f"{_shown(more)} besides. Build the model with the configuration in that folder."
                )
    return found


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "") if names else "nothing"


def write_config(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes the configuration; an older one is replaced atomically."""
    staged = folder / f".{ADAPTER_CONFIG}.new"
    staged.write_text(json.dumps(about["config"], indent=2, sort_keys=True) + "\n")
    os.replace(staged, folder / ADAPTER_CONFIG)
