"""A folder of safetensors as a source of named tensors, and which of them make up which tensor of a model.

Names are matched as `from_pretrained` does it: a base model's prefix may be there or not, and a transformers model
brings its own renamings and conversions (experts kept one by one that the model holds fused). Nothing is read
before it is asked for, one tensor (or one group that is converted together) at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.manifest import MissingCheckpointError
from unbounded.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightFolder:
    """The tensors of a folder of safetensors, by name."""

    def __init__(self, folder: str | os.PathLike[str], *, only: str | None = None) -> None:
        self.folder = Path(folder).expanduser()
        self._files: dict[str, Any] = {}
        self.places = self._find() if only is None else self._list([only])

    def recipe(self, key: str) -> Recipe:
        """A tensor of the model that is this one."""
        return Recipe(lambda: self.read(key), self.shape(key), [key])

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._open(self.places[key]).get_slice(key).get_shape())

    def read(self, key: str) -> torch.Tensor:
        return self._open(self.places[key]).get_tensor(key)

    def close(self) -> None:
        self._files.clear()

    def _find(self) -> dict[str, str]:
        """Which file holds each tensor; every file that is named must be there."""
        if not self.folder.is_dir():
            raise MissingCheckpointError(f"the weights folder {self.folder} does not exist. Check the path.")
        index = self.folder / INDEX
        if index.exists():
            try:
                places = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{index} cannot be read ({error}). Download it again.") from None
            missing = sorted({name for name in places.values() if not (self.folder / name).is_file()})
            if missing:
                raise MissingCheckpointError(
                    f"{index} names files that are not there: {', '.join(missing)}. Download them too."
                )
            return places
        found = [SINGLE] if (self.folder / SINGLE).exists() else sorted(p.name for p in self._all())
        if not found:
            raise MissingCheckpointError(
                f"{self.folder} has no .safetensors files. Give one written by save_pretrained or unbounded.export."
            )
        return self._list(found)

    def _list(self, names: Iterable[str]) -> dict[str, str]:
        return {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118

    def _all(self) -> Iterable[Path]:
        return (path for path in self.folder.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[name] = safe_open(self.folder / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read ({error}). Download it again.") from None
        return self._files[name]


class Recipe:
    """How one tensor of the model is made from tensors of the folder. `shape` is None until a conversion has run."""

    def __init__(self, make: Callable[[], torch.Tensor], shape: tuple[int, ...] | None, keys: list[str]) -> None:
        self.make, self.shape, self.keys = make, shape, keys


class Recipes:
    """The recipes of a model's tensors, and what matched nothing on either side."""

    def __init__(self, weights: WeightFolder, model: nn.Module, names: dict[str, Any]) -> None:
        self.weights = weights
        self.found: dict[str, Recipe] = {}
        self.unexpected: list[str] = []
        self._prefix = str(getattr(model, "base_model_prefix", "") or "")
        self._names = names
        transforms = _transforms_of(model)
        if transforms:
            self._match_with_transforms(model, transforms)
        else:
            for key in weights.places:
                self._match_plain(key)

    def _match_plain(self, key: str) -> None:
        for name in (key, key.removeprefix(f"{self._prefix}."), f"{self._prefix}.{key}"):
            if name in self._names:
                self._add(name, key)
                return
        self.unexpected.append(key)

    def _add(self, name: str, key: str) -> None:
        self.found[name] = self.weights.recipe(key)

    def _match_with_transforms(self, model: nn.Module, transforms: list[Any]) -> None:
        from transformers import core_model_loading as loading

        renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        groups: dict[str, Any] = {}
        for key in sorted(self.weights.places, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, self._prefix or None, self._names)
            if name not in self._names and key in self._names:
                name, pattern = key, None
            if name not in self._names:
                self.unexpected.append(key)
            elif pattern is None:
                self._add(name, key)
            else:
                converter = groups.setdefault(name, deepcopy(by_pattern[pattern]))
                converter.add_tensor(name, key, pattern, lambda key=key: self.weights.read(key))
        for first, converter in groups.items():
            self._add_group(first, converter, model)

    def _add_group(self, first: str, converter: Any, model: nn.Module) -> None:
        """Tensors that come out of one conversion; it runs when the first of them is asked for."""
        names = [first.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
        made: dict[str, torch.Tensor] = {}
        collected = {pattern: list(items) for pattern, items in converter.collected_tensors.items()}

        def make(name: str) -> torch.Tensor:
            if name not in made:
                converter.collected_tensors.update({pattern: list(items) for pattern, items in collected.items()})
                values = converter.convert(first, model=model, config=getattr(model, "config", None))
                made.update({key: value[0] if isinstance(value, list) else value for key, value in values.items()})
            return made.pop(name)

        keys = sorted(key for sources in converter.layer_targets.values() for key in sources)
        for name in names:
            if name in self._names:
                self.found[name] = Recipe(lambda name=name: make(name), None, keys)  # type: ignore[misc]


def _transforms_of(model: nn.Module) -> list[Any]:
    """The renamings and conversions that transformers has for this model; none for others or older releases."""
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))  # type: ignore[arg-type]


def ignored(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """`names` without those that the model says may be ignored."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
