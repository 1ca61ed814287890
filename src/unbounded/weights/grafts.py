"""What peft adds to a model: which modules belong to the base model, their names there, and values for the rest.

peft puts layers around modules of a base model, and copies of modules next to them, which changes the names of the base
model's own parameters; `Grafts.base_name` gives the original ones. A *graft* is one such layer or copy with the module
it surrounds. Its added parameters get the values that peft gives them on a real model: peft's own `update_layer` runs
again on a bare copy of the layer, once the module inside has its values. So the random numbers it draws, including
those it throws away, are the same for the same seed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError


class Grafts:
    """The modules of a model, told apart: the base model's own (without peft: all), and what peft has added."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.base = model
        self._kinds = _Kinds()
        self._roots: set[int] = set()
        self._grafted: set[int] = set()
        self._own: set[int] = set()
        self._base_paths: dict[str, str | None] = {}
        self._walk(model, "", "", None)
        self._configs: dict[str, Any] = getattr(model, "peft_config", None) or {}

    def _walk(self, module: nn.Module, path: str, base_path: str | None, root: nn.Module | None) -> None:
        inner = self._kinds.inner(module) if base_path is not None else None
        if base_path is not None:
            self._own.add(id(module))
        elif root is not None:
            self._grafted.add(id(module))
        if base_path == "":
            self.base = module
        if inner is not None and self._kinds.is_graft(module) and root is None:
            root = module
            self._roots.add(id(module))
        self._base_paths[path] = base_path if inner is None else None
        for name, child in module.named_children():
            below = None if base_path is None else f"{base_path}.{name}" if base_path else name
            if inner is not None:
                below = base_path if name == inner else None
            self._walk(child, f"{path}.{name}" if path else name, below, root)

    def base_name(self, name: str) -> str | None:
        """What the base model calls this parameter or buffer; None for one that peft has added."""
        path, _, key = name.rpartition(".")
        base_path = self._base_paths[path]
        return None if base_path is None else f"{base_path}.{key}" if base_path else key

    def is_added(self, module: nn.Module) -> bool:
        return id(module) not in self._own

    def is_grafted(self, module: nn.Module) -> bool:
        """Whether it was added to a module of the base model, so that `fill` gives it its values."""
        return id(module) in self._grafted

    def steps(self) -> Iterator[tuple[nn.Module | None, list[nn.Module]]]:
        """The modules in tree order, one at a time, or a whole graft, whose values depend on each other."""
        done: set[int] = set()
        for module in self.model.modules():
            root = module if id(module) in self._roots else None
            step = [m for m in (module.modules() if root is not None else [module]) if id(m) not in done]
            done.update(id(m) for m in step)
            if step:
                yield root, step

    # -- first values ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that every layer that peft has added can be made again by itself, and that prompts need no values."""
        held: dict[int, nn.Module] = {}
        for name, module in self.model.named_modules():
            if not self._kinds.is_layer(module) or self.is_added(module):
                continue
            adapters, inner = self._adapters(module), self._kinds.inner(module)
            for adapter in adapters:
                self._arguments(module, adapter, name)
            parts = [child for key, child in module.named_children() if adapters and key != inner]
            if any(held.setdefault(id(p), module) is not module for part in parts for p in part.parameters()):
                raise _unable(module, name, "it shares parameters with others")
        for adapter, config in self._configs.items():
            if _begins_as_embeddings(config):
                raise PlanError(
                    f"the prompts of the adapter {adapter!r} begin as embeddings of the base model, which has none "
                    "until `shard` streams them in. Build the model with real parameters."
                )

    def fill(self, root: nn.Module) -> None:
        """Gives what was added to this graft its first values; its modules hold values that can be written to."""
        for module in reversed(list(root.modules())):  # peft begins with the innermost too
            if self.is_added(module):
                continue
            if self._kinds.is_layer(module):
                for adapter in self._adapters(module):
                    self._make_again(module, adapter)
            elif self._kinds.is_copy(module):
                for twin in module.modules_to_save.values():  # type: ignore[union-attr, operator]
                    _copy_values(module.original_module, twin)  # type: ignore[arg-type]

    def _make_again(self, layer: Any, adapter: str) -> None:
        twin = _bare(layer, self._kinds.inner(layer))
        name = type(layer).__name__
        try:
            # peft makes adapters in ordinary memory, wherever the base model is.
            with torch.no_grad(), torch.device("cpu"):
                twin.update_layer(adapter, **self._arguments(layer, adapter, name))
        except (TypeError, ValueError) as error:
            raise _unable(layer, name, str(error)) from error
        made = dict(twin.named_modules())
        for path, module in layer.named_modules():
            if self.is_added(module) and path in made:
                _copy_own(made[path], module)

    def _adapters(self, layer: Any) -> list[str]:
        """The adapters for which this layer has its own parameters."""
        if getattr(layer, "tied_adapter", None):
            return []
        containers = [getattr(layer, name, None) for name in layer.adapter_layer_names]
        return [name for name in self._configs if any(isinstance(c, nn.Module) and name in c for c in containers)]  # type: ignore[operator]

    def _arguments(self, layer: Any, adapter: str, name: str) -> dict[str, Any]:
        """What peft passes to `update_layer`: from the configuration, or from the layer if layers differ."""
        config = self._configs[adapter]
        tokens = getattr(layer, "token_indices", None)
        if tokens is not None and not hasattr(config, "token_indices"):
            return {"token_indices": tokens[adapter]}
        by_layer = getattr(config, "rank_pattern", None) or getattr(config, "alpha_pattern", None)
        given: dict[str, Any] = {}
        for key, parameter in list(inspect.signature(layer.update_layer).parameters.items())[1:]:
            kept = getattr(layer, key, None)
            is_kept = type(kept) is dict and adapter in kept
            if key == "config":
                given[key] = config
            elif key == "r" and hasattr(config, "init_r"):  # of AdaLoRA, whose `r` has no meaning
                given[key] = config.init_r
            elif hasattr(config, key) and not (by_layer and is_kept):
                given[key] = getattr(config, key)
            elif is_kept:
                given[key] = kept[adapter]  # type: ignore[index]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                raise _unable(layer, name, f"it needs {key!r}")
        return given


def _unable(layer: nn.Module, name: str, why: str) -> PlanError:
    return PlanError(
        f"the layer {name!r} ({type(layer).__module__}.{type(layer).__name__}) is on the meta device and cannot be "
        f"initialised by itself: {why.strip().rstrip('.')}. Build the model with real parameters."
    )


def _begins_as_embeddings(config: Any) -> bool:
    """Whether peft copies rows of the base model's embedding as it makes the prompts."""
    return hasattr(config, "cpt_token_ids") or getattr(config, "prompt_tuning_init", None) in ("TEXT", "SAMPLE_VOCAB")


class _Kinds:
    """peft's classes, by what they do; none if peft is not in use."""

    def __init__(self) -> None:
        self._inner: list[tuple[type, str]] = []
        self._layers: tuple[type, ...] = ()
        self._copies: tuple[type, ...] = ()
        if "peft" not in sys.modules:
            return
        import peft
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils import other

        self._layers, self._copies = (BaseTunerLayer,), (other.ModulesToSaveWrapper,)
        self._inner = [(BaseTunerLayer, "base_layer"), (other.ModulesToSaveWrapper, "original_module")]
        if hasattr(other, "TrainableTokensWrapper"):
            self._inner.append((other.TrainableTokensWrapper, "token_adapter"))
        self._inner += [(BaseTuner, "model"), (peft.PeftModel, "base_model"), (peft.PeftMixedModel, "base_model")]

    def inner(self, module: nn.Module) -> str | None:
        """Which child of a peft module leads to the base model's own module."""
        return next((name for kind, name in self._inner if isinstance(module, kind)), None)

    def is_layer(self, module: nn.Module) -> bool:
        return isinstance(module, self._layers)

    def is_copy(self, module: nn.Module) -> bool:
        return isinstance(module, self._copies)

    def is_graft(self, module: nn.Module) -> bool:
        return self.is_layer(module) or self.is_copy(module)


def _bare(layer: Any, inner: str | None) -> Any:
    """The layer around the same module, without adapters."""
    twin = copy.copy(layer)
    twin.__dict__.update({key: dict(value) for key, value in layer.__dict__.items() if type(value) is dict})
    for name, child in layer._modules.items():
        if name != inner and hasattr(type(child), "__setitem__"):  # adapters are in containers, by name
            twin._modules[name] = type(child)()
    return twin


def _copy_values(source: nn.Module, target: nn.Module) -> None:
    """Copies parameters and buffers of a module into another of the same kind."""
    for one, other in zip(source.modules(), target.modules(), strict=True):
        _copy_own(one, other)


def _copy_own(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for key, value in source._parameters.items():
            into = target._parameters[key]
            if value is not None and into is not None:
                into.copy_(value)
    for key, buffer in source._buffers.items():
        if buffer is not None:
            target._buffers[key] = buffer.clone()
