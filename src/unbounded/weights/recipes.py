"""Which tensors of a folder of safetensors make up which tensor of a model.

Names are matched as `from_pretrained` does it: a base model's prefix may be there or not, and a transformers model
brings its own renamings and conversions (experts kept one by one that the model holds fused). One tensor, or one
group that is converted together, is read at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from unbounded.ranks.cut import Cut
from unbounded.weights.safetensors_reader import WeightFolder


class Recipe:
    """How one tensor of the model is made from tensors of the folder. `shape` is None until a conversion has run."""

    def __init__(
        self,
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...] | None,
        keys: list[str],
        read_part: Callable[[Cut], torch.Tensor] | None = None,
    ) -> None:
        self.make, self.shape, self.keys, self._read_part = make, shape, keys, read_part

    def make_part(self, cut: Cut) -> torch.Tensor:
        """A tensor-axis rank's part of it; only that part is read if it is one tensor of the folder."""
        return cut.take(self.make()) if self._read_part is None else self._read_part(cut)


def read_recipe(weights: WeightFolder, key: str) -> Recipe:
    """The recipe of a tensor that is stored as it is in the folder."""
    return Recipe(lambda: weights.read(key), weights.shape(key), [key], lambda cut: weights.read_part(key, cut))


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
        self.found[name] = read_recipe(self.weights, key)

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
