"""Tensor parallelism of a model: the layers that compute with parts of parameters (`cutting`).

`cut` takes each rank's part of the parameters, which stay the same objects; `attach` lets the layers compute with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.blocks import find_stacks, unwrap
from unbounded.parallel.collectives import LayerSite
from unbounded.parallel.tensor import attention, layers, vocabulary
from unbounded.parallel.tensor.cutting import Layer, LayerCuts
from unbounded.parallel.tensor.dropout import attach_dropout
from unbounded.parallel.tensor.gradients import Partial, attach_sum
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.parallel.tensor.styles import Kind, Pairs
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut


class TensorParallel:
    """See the module's docstring. `cuts` has the cut of every parameter that is cut, by the parameter's id."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        styles: Pairs | None,
        *,
        sequence: bool,
        stacks: Sequence[Sequence[nn.Module]] | None = None,
        by_context: bool = False,
    ) -> None:
        self.model, self.base, self.axis = model, unwrap(model), axis
        self.scene = Scene(axis, by_sequence=sequence)
        cutting = LayerCuts(model, axis, styles)
        self.names, self.layers, self.cuts = cutting.names, cutting.layers, cutting.cuts
        found = find_stacks(self.base) if stacks is None else stacks
        self.blocks = [list(stack) for stack in found] if sequence else []
        # A context axis must cut what the tensor axis has already cut: its dropout is around the blocks.
        self._dropping = [block for stack in found for block in stack] if sequence or by_context else []
        if sequence and not self.blocks:
            raise PlanError("sequence=True needs repeated blocks, but the model has none. Leave it out of the plan.")
        self.heads: dict[nn.Module, vocabulary.HeadPart] = {}
        self._detaches: list[layers.Detach] = []

    def cut(self) -> None:
        """Leaves this rank's part in every parameter that is cut. They stay the same objects."""
        for parameter in {id(p): p for p in self.model.parameters()}.values():
            cut = self.cuts.get(id(parameter))
            if cut is not None:
                with torch.no_grad():
                    parameter.data = cut.take(parameter.data)

    def attach(self) -> None:
        """Lets the layers compute with the parts."""
        self._attach_layers()
        self._attach_sums()
        self._attach_dropouts()
        handle = self.model.register_forward_pre_hook(lambda *_: self.scene.begin())
        self._detaches.append(handle.remove)

    def detach(self) -> None:
        """Undoes it for every layer; parameters must be whole by then."""
        for detach in reversed(self._detaches):
            detach()
        self._detaches.clear()

    def _attach_layers(self) -> None:
        for layer in self.layers:
            self._detaches.append(self._attach(layer))
        for module, held in self._attentions():
            self._detaches.append(attention.adjust_counts(module, self.axis.size, held))
        for stack in self.blocks:
            for block in stack:
                self._detaches.append(self._attach_block(block, is_first=block is stack[0], is_last=block is stack[-1]))
        for module in self._sequence_regions():
            self._detaches.append(self._attach_region(module))

    def _attach(self, layer: Layer) -> layers.Detach:
        kind, module, scene, site = layer.style.kind, layer.module, self.scene, self.scene.at(layer.name)
        base = layers.adapted_layers(module)[0]
        if kind is Kind.COLUMN:
            cut = layer.cuts[base, "weight"]
            attached = layers.attach_column(module, scene, site, joins=layer.style.joins, width=cut.shape[cut.dim])
            return layers.together(attached, layers.adjust_sizes(base, cut, is_row=False))
        if kind is Kind.ROW:
            attached = layers.attach_row(module, scene, site, splits=layer.style.splits, inner=base)
            return layers.together(attached, layers.adjust_sizes(base, layer.cuts[base, "weight"], is_row=True))
        if kind is Kind.VOCABULARY:
            return layers.attach_vocabulary(module, scene, site, layer.cuts[module, "weight"])  # type: ignore[arg-type]
        if kind is Kind.EXPERTS:
            return layers.attach_experts(module, scene, site)
        if kind is Kind.HEAD:
            return self._attach_head(layer, layer.cuts[base, "weight"])
        return lambda: None

    def _attach_head(self, layer: Layer, cut: Cut) -> layers.Detach:
        part = vocabulary.HeadPart(self.scene, self.scene.at(layer.name), cut)
        attached = vocabulary.attach_head(layer.module, part)
        self.heads[layer.module] = part
        if not vocabulary.TokenLoss.fits(self.base):
            return attached
        return layers.together(vocabulary.TokenLoss(self.base, part).attach(), attached)

    def _attentions(self) -> Iterator[tuple[nn.Module, tuple[int, int]]]:
        """The attention modules whose heads are cut, with the key heads of the whole and those held here."""
        found: dict[nn.Module, list[tuple[int, int]]] = {}
        for layer in self.layers:
            width = attention.head_width(layer.parent)
            if width is None or layer.style.kind is not Kind.COLUMN or layer.style.joins:
                continue
            base = layers.adapted_layers(layer.module)[0]
            cut = layer.cuts[base, "weight"]
            whole, held = cut.shape[cut.dim] // width, cut.local_shape[cut.dim] // width
            sections = layer.style.sections
            found.setdefault(layer.parent, []).append((whole // sections, held // sections))  # type: ignore[arg-type]
        for module, heads in found.items():
            yield module, min(heads)

    def _sequence_regions(self) -> list[nn.Module]:
        """Modules around column layers that take the whole sequence: not the blocks themselves."""
        blocks = {block for stack in self.blocks for block in stack}
        columns = [layer for layer in self.layers if layer.style.kind is Kind.COLUMN and layer.parent is not None]
        found = {layer.parent: None for layer in columns if layer.parent not in blocks} if self.blocks else {}
        return [module for module in found if module is not None]

    def _attach_region(self, module: nn.Module) -> layers.Detach:
        scene, site = self.scene, self._site(module)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if scene.hold is not Hold.SEQUENCE:
                return None
            if args and isinstance(args[0], torch.Tensor):
                return (scene.gather_sequence(args[0], site), *args[1:]), kwargs
            if isinstance(kwargs.get("hidden_states"), torch.Tensor):
                return args, {**kwargs, "hidden_states": scene.gather_sequence(kwargs["hidden_states"], site)}
            return None

        return module.register_forward_pre_hook(before, with_kwargs=True).remove

    def _attach_block(self, block: nn.Module, *, is_first: bool, is_last: bool) -> layers.Detach:
        scene, site = self.scene, self._site(block)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                return (scene.begin_block(args[0], site, is_first=is_first), *args[1:]), kwargs
            hidden = scene.begin_block(kwargs["hidden_states"], site, is_first=is_first)
            return args, {**kwargs, "hidden_states": hidden}

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return scene.end_block(output, site, is_last=is_last)

        handles = [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after, prepend=True),  # inside the engine's own
        ]
        return layers.together(*(handle.remove for handle in handles))

    def _attach_sums(self) -> None:
        """One sum per block for all parameters whose gradients are parts."""
        by_block: dict[nn.Module, dict[int, Partial]] = {}
        for name, holder, attribute in self._partial_places():
            parameter = holder._parameters.get(attribute)
            if parameter is not None:
                partial = Partial(holder, attribute, self.cuts.get(id(parameter)))
                by_block.setdefault(self._block_of(name, holder), {})[id(parameter)] = partial
        for block, partials in by_block.items():
            self._detaches.append(attach_sum(block, list(partials.values()), self._site(block)))

    def _partial_places(self) -> Iterator[tuple[str, nn.Module, str]]:
        for layer in self.layers:
            for holder, attribute in layer.partial:
                yield layer.name, holder, attribute
        if not self.blocks:
            return
        inside = set(self._sequence_regions())
        rows = {layers.adapted_layers(x.module)[0] for x in self.layers if x.style.kind is Kind.ROW}
        names = {module: name for name, module in self.names.items()}
        for stack in self.blocks:
            for block in stack:
                for module in _outside(block, inside):
                    for attribute, parameter in module._parameters.items():
                        if id(parameter) not in self.cuts:
                            yield names[module], module, attribute
                for module in block.modules():
                    if module in rows and "bias" in module._parameters:
                        yield names[module], module, "bias"

    def _site(self, module: nn.Module) -> LayerSite:
        return self.scene.at(next(name for name, other in self.names.items() if other is module))

    def _block_of(self, name: str, holder: nn.Module) -> nn.Module:
        """The repeated block around a module, or the module."""
        found = re.match(r"(.*\.\d+)\.", name)
        return self.names.get(found.group(1), holder) if found else holder

    def _attach_dropouts(self) -> None:
        found: dict[nn.Module, None] = {}
        if self._dropping:
            found.update(dict.fromkeys(self._dropping))
        else:
            columns = [layer for layer in self.layers if layer.style.kind is Kind.COLUMN]
            found.update({layer.parent: None for layer in columns if layer.parent is not None})
        for module in found:
            detach = attach_dropout(module, self.scene)
            if detach is not None:
                self._detaches.append(detach)


def _outside(module: nn.Module, regions: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it, but not regions of the whole sequence nor what lies in them."""
    if module in regions:
        return
    yield module
    for child in module.children():
        yield from _outside(child, regions)
