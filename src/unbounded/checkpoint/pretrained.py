"""Pretrained weights into a model on the meta device: unit by unit, straight into partitions.

The first rank reads, everyone takes its part of the broadcast, and no rank ever holds more of the model than the
units that are open. What the files do not have is initialised by the modules themselves, as without files; keys
that are missing or unexpected are reported as `from_pretrained` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.adapters import base_folder, read_adapters
from unbounded.checkpoint.snapshot import persistent_buffers
from unbounded.checkpoint.weightfiles import Recipe, Recipes, WeightFolder, ignored
from unbounded.errors import CheckpointError
from unbounded.zero.initial import Entries, Installer, gather_values
from unbounded.zero.meta import MetaModel
from unbounded.zero.unit import Unit
from unbounded.zero.units import Member

logger = logging.getLogger("unbounded")


def install_weights(
    model: nn.Module, entries: Entries, installer: Installer, folder: str | os.PathLike[str], device: torch.device
) -> None:
    """All ranks of the axis must call this. Fills the units from a folder of safetensors.

    A folder of adapters alone stands for its base model's folder, with the adapters of the same name from here.
    """
    given = Path(folder).expanduser()
    base = base_folder(given)
    adapters = read_adapters(given, model) if base != given else {}
    weights = WeightFolder(base)
    try:
        reads = installer.ranks.rank == 0
        PretrainedModel(model, device, weights, entries, adapters, reads=reads).install(entries, installer)
    finally:
        weights.close()


class PretrainedModel(MetaModel):
    """A model whose modules are filled from files, and initialised where the files have nothing for them."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        weights: WeightFolder,
        entries: Entries,
        adapters: Mapping[str, Recipe],
        *,
        reads: bool,
    ) -> None:
        super().__init__(model, device)
        self.reads, self.folder = reads, weights.folder
        members = [member for _, members, _ in entries for member in members]
        self.is_meta = any(_is_stand_in(member.parameter) for member in members)
        parameters = [(m.names, m.parameter) for m in members]
        buffers = [([name], buffer) for name, buffer in persistent_buffers(model).items()]
        tensors: list[tuple[list[str], Any]] = [*parameters, *buffers]
        own = {name: tensor for names, tensor in tensors for name in self._base_names(names)}
        recipes = Recipes(weights, self.grafts.base, own)
        self._recipes = {
            name: recipes.found[base]
            for names, _ in tensors
            for base in [next((n for n in self._base_names(names) if n in recipes.found), None)]
            if base is not None
            for name in names
        } | dict(adapters)
        self._check_shapes(tensors)
        if reads:
            self._report(tensors, recipes.unexpected)
        self.check()

    def _base_names(self, names: Sequence[str]) -> list[str]:
        """What the base model calls a tensor; nothing for one that peft has added."""
        found = (self.grafts.base_name(name) for name in names)
        return [name for name in found if name is not None]

    def _check_shapes(self, tensors: Sequence[tuple[list[str], Any]]) -> None:
        wrong = []
        for (name, *_), tensor in tensors:
            recipe, shape = self._recipes.get(name), tuple(tensor.shape)
            if recipe is not None and recipe.shape not in (None, shape):
                wrong.append(f"{name} has the shape {list(shape)} and the file's {list(recipe.shape or ())}")
        if wrong:
            shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(
                f"the weights in {self.folder} do not fit the model: {shown}. "
                "Build the model from the configuration beside the weights."
            )

    def _report(self, tensors: Sequence[tuple[list[str], Any]], unexpected: Sequence[str]) -> None:
        base = self.grafts.base
        found = [self._base_names(names) for names, _ in tensors if names[0] not in self._recipes]
        missing = ignored(
            [names[0] for names in found if names], getattr(base, "_keys_to_ignore_on_load_missing", None)
        )
        unexpected = ignored(unexpected, getattr(base, "_keys_to_ignore_on_load_unexpected", None))
        kind = type(base).__name__
        if unexpected:
            logger.warning("weights in %s that %s does not use: %s", self.folder, kind, _shown(unexpected))
        if missing:
            logger.warning(
                "weights of %s that %s does not have, newly initialised: %s", kind, self.folder, _shown(missing)
            )

    def _lacking(self, path: str, module: nn.Module) -> list[str]:
        """Only what the files do not give needs a module that can initialise itself."""
        if self.grafts.is_grafted(module):
            return []
        prefix = f"{path}." if path else ""
        lacking = [key for key, p in module._parameters.items() if p is not None and p.numel() and self.is_meta]
        lacking += [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        return [key for key in lacking if prefix + key not in self._recipes]

    def _is_given(self, name: str) -> bool:
        return name in self._recipes or super()._is_given(name)

    def _unable(self, module: str, lacking: str) -> Exception:
        return CheckpointError(
            f"{lacking} of {module} are on the meta device and not in {self.folder}, and it has no reset_parameters "
            "method. Give it one, or weights that have them."
        )

    def _open(self, unit: Unit, members: Sequence[Member]) -> torch.Tensor:
        if self.is_meta:
            return super()._open(unit, members)
        parameters = {member.names[0]: member.parameter for member in members}
        return gather_values(unit, parameters, members[0].parameter.dtype)

    def _fill(self, module: nn.Module) -> None:
        lacking = self._lacking(self.prefixes[id(module)].removesuffix("."), module)
        self._materialise_buffers(module)
        if lacking:
            self._reset(module)
        self._read(module)

    def _fill_step(self, graft: nn.Module | None, modules: Sequence[nn.Module]) -> None:
        super()._fill_step(graft, modules)
        for module in modules:
            if self.grafts.is_grafted(module):
                self._read(module)

    def _read(self, module: nn.Module) -> None:
        prefix = self.prefixes[id(module)]
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            recipe = self._recipes.get(prefix + key)
            # Buffers stay whole on every rank; parameters come to the others by a broadcast.
            if tensor is not None and recipe is not None and (self.reads or key in module._buffers):
                self._copy(recipe, tensor)

    def _copy(self, recipe: Recipe, target: torch.Tensor) -> None:
        value = recipe.make()
        if value.shape != target.shape:
            raise CheckpointError(
                f"{', '.join(recipe.keys[:3])} of {self.folder} make a tensor of shape {list(value.shape)}, "
                f"but the model has {list(target.shape)}. Check the configuration."
            )
        with torch.no_grad():
            target.copy_(value)


def _is_stand_in(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no values of its own: it was on the meta device."""
    with torch._C.DisableTorchFunctionSubclass():
        held = 0 if parameter.is_meta else parameter.untyped_storage().nbytes()
        return held < parameter.numel() * parameter.element_size()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
