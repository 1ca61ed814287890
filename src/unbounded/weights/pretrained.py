"""Streams pretrained weights into a model on the meta device: unit by unit, straight into partitions.

The first rank reads, every rank takes its part of the broadcast, and no rank ever holds more of the model than the
units that are open. Modules initialise what the files do not have, as without files. Missing and unexpected keys are
reported as `from_pretrained` does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.errors import CheckpointError
from unbounded.paths import expand_home
from unbounded.ranks.cut import Cut
from unbounded.weights.adapter_files import base_folder, read_adapters
from unbounded.weights.grafts import Grafts
from unbounded.weights.recipes import Recipe, Recipes, ignored
from unbounded.weights.safetensors_reader import WeightFolder
from unbounded.zero.members import persistent_buffers
from unbounded.zero.setup.initial import Carried, Entries, Installer
from unbounded.zero.setup.meta import ModuleFill

logger = logging.getLogger("unbounded")


def install_weights(
    model: nn.Module,
    entries: Entries,
    installer: Installer,
    folder: str | os.PathLike[str],
    device: torch.device,
    *,
    cuts: Mapping[int, Cut] | None = None,
    absent: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    carried: Carried | None = None,
) -> None:
    """All ranks of the axis must call this. Fills the units from a folder of safetensors, and states from `carried`.

    A folder with only adapters stands for its base model's folder, plus the adapters in it.
    """
    given = expand_home(folder)
    base = base_folder(given)
    adapters = read_adapters(given, model) if base != given else {}
    weights = WeightFolder(base)
    try:
        grafts = Grafts(model)
        values = FileValues(model, weights, entries, grafts, adapters, reads=installer.ranks.rank == 0, cuts=cuts)
        is_meta = any(_is_stand_in(member.parameter) for _, members, _ in entries for member in members)
        fill = ModuleFill(
            model, device, grafts, given=values, is_meta=is_meta, cuts=cuts, absent=absent, carried=carried
        )
        fill.check()
        fill.install(entries, installer)
    finally:
        weights.close()


class FileValues:
    """The tensors of a model that files have. `reads` says whether this rank reads what is broadcast to the others."""

    def __init__(
        self,
        model: nn.Module,
        weights: WeightFolder,
        entries: Entries,
        grafts: Grafts,
        adapters: Mapping[str, Recipe],
        *,
        reads: bool,
        cuts: Mapping[int, Cut] | None = None,
    ) -> None:
        self._cuts = cuts or {}
        self.reads, self.folder, self.grafts = reads, weights.folder, grafts
        self._made: tuple[Recipe, torch.Tensor] | None = None
        members = [member for _, members, _ in entries for member in members]
        parameters = [(m.names, m.parameter if m.whole is None else m.whole) for m in members if m.first == 0]
        buffers = [([name], buffer) for name, buffer in persistent_buffers(model).items()]
        tensors: list[tuple[list[str], Any]] = [*parameters, *buffers]
        own = {name: tensor for names, tensor in tensors for name in self._base_names(names)}
        recipes = Recipes(weights, grafts.base, own)
        self._recipes = {
            name: recipes.found[base]
            for names, _ in tensors
            for base in [next((n for n in self._base_names(names) if n in recipes.found), None)]
            if base is not None
            for name in names
        } | dict(adapters)
        self._check_shapes(tensors)
        self._check_values([name for (name, *_), _ in parameters], weights)
        self._check_tied(parameters, recipes.found, weights)
        if reads:
            self._report(tensors, recipes.unexpected)

    def has(self, name: str) -> bool:
        return name in self._recipes

    def read(
        self,
        name: str,
        target: torch.Tensor,
        *,
        is_buffer: bool,
        rows: tuple[int, int] | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Buffers stay whole on every rank; parameters come to the others by a broadcast."""
        if cut is not None and self.reads:
            with torch.no_grad():
                cut.put(target, self._recipes[name].make_part(cut).to(target))
        elif self.reads or is_buffer:
            self._copy(self._recipes[name], target, rows)

    def unable(self, module: str, lacking: str) -> Exception:
        return CheckpointError(
            f"{lacking} of {module} are on the meta device but not in {self.folder}, and the module has no "
            "reset_parameters method. Give it one, or use weights that have them."
        )

    def _base_names(self, names: Sequence[str]) -> list[str]:
        """The base model's name of a tensor; empty for one that peft has added."""
        found = (self.grafts.base_name(name) for name in names)
        return [name for name in found if name is not None]

    def _check_shapes(self, tensors: Sequence[tuple[list[str], Any]]) -> None:
        wrong = []
        for (name, *_), tensor in tensors:
            cut = self._cuts.get(id(tensor))
            recipe, shape = self._recipes.get(name), tuple(tensor.shape) if cut is None else cut.shape
            if recipe is not None and recipe.shape not in (None, shape):
                wrong.append(f"{name} has the shape {list(shape)}, but {list(recipe.shape or ())} in the file")
        if wrong:
            shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(
                f"the weights in {self.folder} do not fit the model: {shown}. "
                "Build the model from the configuration in the same folder."
            )

    def _check_values(self, names: Sequence[str], weights: WeightFolder) -> None:
        """Raises for a quantized model: its codes would be taken for the values of weights."""
        keys = [key for name in names if name in self._recipes for key in self._recipes[name].keys]
        codes = [key for key in keys if key in weights.places and not weights.is_float(key)]
        if codes or _is_quantized(self.folder):
            what = f"{codes[0]} in it is not made of floats" if codes else "config.json says so"
            raise CheckpointError(
                f"{self.folder} holds a quantized model ({what}), which cannot be trained as it is. Load it with "
                "transformers, call its dequantize(), save it, and give that folder."
            )

    def _check_tied(
        self, parameters: Sequence[tuple[list[str], Any]], found: Mapping[str, Recipe], weights: WeightFolder
    ) -> None:
        """Raises if there are several values for one parameter, of which all but one would be dropped."""
        for names, parameter in parameters:
            stored = [name for name in self._base_names(names) if name in found and found[name].shape is not None]
            for name in stored[1:]:
                (one,), (other,) = found[stored[0]].keys, found[name].keys
                if one != other and not weights.are_equal(one, other, parameter.dtype):
                    raise CheckpointError(
                        f"{self.folder} has different values of {one} and {other}, but in the model they are one "
                        'parameter. Build it with two: in transformers, "tie_word_embeddings": false in config.json.'
                    )

    def _report(self, tensors: Sequence[tuple[list[str], Any]], unexpected: Sequence[str]) -> None:
        base = self.grafts.base
        found = [self._base_names(names) for names, _ in tensors if names[0] not in self._recipes]
        missing = ignored(
            [names[0] for names in found if names], getattr(base, "_keys_to_ignore_on_load_missing", None)
        )
        unexpected = [key for key in unexpected if not self._is_elsewhere(key)]
        unexpected = ignored(unexpected, getattr(base, "_keys_to_ignore_on_load_unexpected", None))
        kind = type(base).__name__
        if unexpected:
            logger.warning("weights in %s that %s does not use: %s", self.folder, kind, _shown(unexpected))
        if missing:
            logger.warning(
                "weights of %s that %s does not have, newly initialised: %s", kind, self.folder, _shown(missing)
            )

    def _is_elsewhere(self, key: str) -> bool:
        """Whether another stage of a pipeline holds a weight: its place in the model is empty here."""
        base = self.grafts.base
        prefix = str(getattr(base, "base_model_prefix", "") or "")
        for name in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
            path, _, attribute = name.rpartition(".")
            try:
                module = base.get_submodule(path)
            except AttributeError:
                continue
            if attribute in module._parameters:
                return module._parameters[attribute] is None
        return False

    def _copy(self, recipe: Recipe, target: torch.Tensor, rows: tuple[int, int] | None) -> None:
        """Tiles come one after another, so the tensor that one was cut from is kept for the next."""
        if self._made is None or self._made[0] is not recipe or rows is None:
            self._made = recipe, recipe.make()
        value = self._made[1] if rows is None else self._made[1][rows[0] : rows[1]]
        if rows is None:
            self._made = None
        if value.shape != target.shape:
            raise CheckpointError(
                f"{', '.join(recipe.keys[:3])} of {self.folder} make a tensor of shape {list(value.shape)}, "
                f"but the model has {list(target.shape)}. Check the configuration."
            )
        with torch.no_grad():
            target.copy_(value)


def _is_quantized(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("quantization_config"))


def _is_stand_in(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no values of its own: it was on the meta device."""
    with torch._C.DisableTorchFunctionSubclass():
        held = 0 if parameter.is_meta else parameter.untyped_storage().nbytes()
        return held < parameter.numel() * parameter.element_size()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
