"""Pretrained weights into a model on the meta device: unit by unit, straight into partitions.

The first rank reads, everyone takes its part of the broadcast, and no rank ever holds more of the model than the
units that are open. What the files do not have is initialised by the modules themselves, as without files; keys
that are missing or unexpected are reported as `from_pretrained` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.snapshot import persistent_buffers
from unbounded.checkpoint.weightfiles import Recipe, Recipes, WeightFolder, ignored
from unbounded.errors import CheckpointError
from unbounded.zero.initial import Installer, MetaModel, Places
from unbounded.zero.unit import Unit
from unbounded.zero.units import Member

logger = logging.getLogger("unbounded")
Entries = Sequence[tuple[Unit, Sequence[Member], Places]]


def install_weights(
    model: nn.Module, entries: Entries, installer: Installer, folder: str | os.PathLike[str], device: torch.device
) -> None:
    """All ranks of the axis must call this. Fills the units from a folder of safetensors."""
    weights = WeightFolder(folder)
    try:
        PretrainedModel(model, device, weights, entries, reads=installer.ranks.rank == 0).install(entries, installer)
    finally:
        weights.close()


class PretrainedModel(MetaModel):
    """A model whose modules are filled from files, and initialised where the files have nothing for them."""

    def __init__(
        self, model: nn.Module, device: torch.device, weights: WeightFolder, entries: Entries, *, reads: bool
    ) -> None:
        self.reads = reads
        members = [member for _, members, _ in entries for member in members]
        self._is_meta = any(_is_stand_in(member.parameter) for member in members)
        self._aliases = {id(member.parameter): member.names for member in members}
        self._buffers = persistent_buffers(model)
        names: dict[str, Any] = {name: member.parameter for member in members for name in member.names}
        self.recipes = Recipes(weights, model, {**names, **self._buffers})
        self._prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        self._check_shapes(members)
        self._report(model, members, weights)
        super().__init__(model, device)
        self.check()

    def _recipe(self, parameter: Any) -> Recipe | None:
        names = self._aliases.get(id(parameter), [])
        return next((self.recipes.found[name] for name in names if name in self.recipes.found), None)

    def _check_shapes(self, members: Sequence[Member]) -> None:
        wrong = []
        for member in members:
            recipe, shape = self._recipe(member.parameter), tuple(member.parameter.shape)
            if recipe is not None and recipe.shape not in (None, shape):
                wrong.append(f"{member.names[0]} has the shape {list(shape)} and the file's {list(recipe.shape or ())}")
        for name, buffer in self._buffers.items():
            recipe = self.recipes.found.get(name)
            if recipe is not None and recipe.shape not in (None, tuple(buffer.shape)):
                wrong.append(f"the buffer {name} has the shape {list(buffer.shape)} and the file's {recipe.shape}")
        if wrong:
            shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(
                f"the weights in {self.recipes.weights.folder} do not fit the model: {shown}. "
                "Build the model from the configuration beside the weights."
            )

    def _report(self, model: nn.Module, members: Sequence[Member], weights: WeightFolder) -> None:
        missing = [member.names[0] for member in members if self._recipe(member.parameter) is None]
        missing += [name for name in self._buffers if name not in self.recipes.found]
        missing = ignored(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
        unexpected = ignored(self.recipes.unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
        if not self.reads:
            return
        kind = type(model).__name__
        if unexpected:
            logger.warning("weights in %s that %s does not use: %s", weights.folder, kind, _shown(unexpected))
        if missing:
            logger.warning(
                "weights of %s that %s does not have, newly initialised: %s", kind, weights.folder, _shown(missing)
            )

    def check(self) -> None:
        """Only what the files do not give needs a module that can initialise itself."""
        for name, module in self.model.named_modules():
            prefix = f"{name}." if name else ""
            lacking = [key for key, p in module._parameters.items() if p is not None and self._is_open(p)]
            lacking += [
                key for key, b in module._buffers.items()
                if b is not None and b.is_meta and prefix + key not in self.recipes.found
            ]  # fmt: skip
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if lacking and not callable(reset) and not callable(self._init_weights):
                raise CheckpointError(
                    f"{', '.join(lacking)} of the module {name or 'model'!r} ({type(module).__name__}) are on the meta "
                    f"device and not in {self.recipes.weights.folder}, and it has no reset_parameters method. "
                    "Give it one, or weights that have them."
                )

    def _is_open(self, parameter: Any) -> bool:
        return self._is_meta and parameter.numel() > 0 and self._recipe(parameter) is None

    def _initialise(
        self,
        module: nn.Module,
        home: Mapping[int, tuple[Unit, Sequence[Member], Places]],
        values: Mapping[int, torch.Tensor],
    ) -> None:
        own = [p for p in module._parameters.values() if p is not None and id(p) in home]
        prefix = self._prefixes.get(id(module), "")
        if any(self._is_open(p) for p in own) or any(b is not None and b.is_meta for b in module._buffers.values()):
            super()._initialise(module, home, values)
        for parameter in own:
            unit = home[id(parameter)][0]
            self._fill(parameter, unit.slot_views(values[id(unit)])[parameter._index])  # type: ignore[attr-defined]
        for name, buffer in module._buffers.items():
            recipe = self.recipes.found.get(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and recipe is not None:
                buffer.copy_(recipe.make())

    def _fill(self, parameter: Any, view: torch.Tensor) -> None:
        recipe = self._recipe(parameter)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if recipe is None:
                if not self._is_meta:
                    view.copy_(parameter)
            elif self.reads:
                value = recipe.make()
                if value.shape != view.shape:
                    raise CheckpointError(
                        f"{', '.join(recipe.keys[:3])} of {self.recipes.weights.folder} make a tensor of shape "
                        f"{list(value.shape)}, but the model has {list(view.shape)}. Check the configuration."
                    )
                view.copy_(value)


def _is_stand_in(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no values of its own: it was on the meta device."""
    with torch._C.DisableTorchFunctionSubclass():
        held = 0 if parameter.is_meta else parameter.untyped_storage().nbytes()
        return held < parameter.numel() * parameter.element_size()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
