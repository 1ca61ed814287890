"""Tensor parallelism of a model: which parameters are cut how, and the layers that compute with the parts.

`TensorParallel` first finds everything out and raises what cannot work, from values that are the same on all ranks;
`apply` then takes each rank's part of the parameters, which stay the same objects, and attaches the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.blocks import find_stacks, unwrap
from unbounded.parallel.collectives import LayerSite
from unbounded.parallel.tensor import attention, layers, vocabulary
from unbounded.parallel.tensor.dropout import attach_dropout
from unbounded.parallel.tensor.families import find_pairs
from unbounded.parallel.tensor.gradients import Partial, attach_sum
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.parallel.tensor.styles import Kind, Pairs, Style, find_style, read_style
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut, cut_evenly


@dataclass(eq=False)
class Layer:
    """A module that a style applies to, and the cuts of its own parameters by (module, attribute)."""

    name: str
    module: nn.Module
    parent: nn.Module | None
    style: Style
    cuts: dict[tuple[nn.Module, str], Cut] = field(default_factory=dict)
    partial: list[tuple[nn.Module, str]] = field(default_factory=list)


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
        self.names = dict(self.base.named_modules())
        self.layers = list(self._find_layers(find_pairs(model, styles)))
        self.layers += list(self._find_tied())
        self.cuts = self._collect_cuts()
        found = find_stacks(self.base) if stacks is None else stacks
        self.blocks = [list(stack) for stack in found] if sequence else []
        # What a context axis takes its part of must be the tensor axis' part already: its dropout is around the blocks.
        self._dropping = [block for stack in found for block in stack] if sequence or by_context else []
        if sequence and not self.blocks:
            raise PlanError("sequence=True needs repeated blocks, and the model has none. Leave it out of the plan.")
        self.heads: dict[nn.Module, vocabulary.HeadPart] = {}
        self._detaches: list[layers.Detach] = []

    # -- finding out ---------------------------------------------------------------------------------------------------

    def _find_layers(self, pairs: Pairs) -> Iterator[Layer]:
        unused = dict.fromkeys(pairs)
        for name, module in self.names.items():
            pair = find_style(name, pairs)
            for attribute in module._parameters:
                inner = find_style(f"{name}.{attribute}", pairs)
                if inner is not None:
                    unused.pop(inner, None)
            if pair is not None:
                unused.pop(pair, None)
            if pair is not None and _is_here(module):
                parent = self.names.get(name.rpartition(".")[0])
                yield self._layer(Layer(name, module, parent, read_style(pair[1], pair[0])), pairs)
        known = set(pairs) - set(unused)
        if not known:
            raise PlanError(
                f"no layer of {type(self.base).__name__} has a name that the tensor styles have: "
                f"{', '.join(repr(pattern) for pattern, _ in pairs[:4])}. Give patterns of its own names as styles=."
            )

    def _find_tied(self) -> Iterator[Layer]:
        """Embeddings and heads without a style of their own whose weight belongs to one that is cut by vocabulary."""
        free = [layer for layer in self.layers if layer.style.kind in (Kind.VOCABULARY, Kind.HEAD)]
        cut = {id(layer.module._parameters["weight"]) for layer in free if "weight" in layer.module._parameters}
        styled = {layer.module for layer in self.layers}
        for name, module in self.names.items():
            if module not in styled and id(module._parameters.get("weight")) in cut:
                style = Style(Kind.VOCABULARY if isinstance(module, nn.Embedding) else Kind.HEAD)
                yield self._layer(Layer(name, module, None, style), ())

    def _layer(self, layer: Layer, pairs: Pairs) -> Layer:
        kind, module = layer.style.kind, layer.module
        if kind is Kind.EXPERTS:
            for attribute in module._parameters:
                self._cut_expert(layer, attribute, pairs)
        elif kind is Kind.SUM:
            layer.partial += [(module, attribute) for attribute in module._parameters]
        elif kind in (Kind.VOCABULARY, Kind.TABLE):
            if not isinstance(module, nn.Embedding):
                raise PlanError(
                    f"{layer.name!r} is a {type(module).__name__}, and the style {kind.value!r} is for nn.Embedding. "
                    "Give it another style."
                )
            self._cut(layer, module, "weight", 0 if kind is Kind.VOCABULARY else 1)
        else:
            layers.check_layer(layer.name, module, kind.value)
            self._cut_linear(layer)
        return layer

    def _cut_linear(self, layer: Layer) -> None:
        base, down, up = layers.adapted_layers(layer.module)
        is_row, is_last = layer.style.kind is Kind.ROW, int(layers.is_transposed(base))
        self._cut(layer, base, "weight", is_last if not is_row else 1 - is_last)
        if not is_row:
            self._cut(layer, base, "bias", 0)
        for name in down:
            # What the adapter adds goes in and out with the layer: the matrix that is not cut sees a part of the sum.
            if is_row:
                self._cut(layer, down[name], "weight", 1)
            else:
                self._cut(layer, up[name], "weight", 0)
            layer.partial.append((up[name] if is_row else down[name], "weight"))

    def _cut(self, layer: Layer, holder: nn.Module, attribute: str, dim: int) -> None:
        parameter = holder._parameters.get(attribute)
        if parameter is None:
            return
        shape, rank, size = tuple(parameter.shape), self.axis.rank, self.axis.size
        style, width = layer.style, attention.head_width(layer.parent)
        is_free = style.kind in (Kind.VOCABULARY, Kind.HEAD)
        if style.kind is Kind.TABLE:
            width = 1
        if is_free or style.joins or style.splits or width is None or style.sections > 1:
            if not is_free:
                self._check_divides(layer, shape[dim], size)
            cut = cut_evenly(shape, dim, rank, size, sections=style.sections)
        else:
            cut = attention.cut_by_heads(layer.name, shape, dim, rank, size, width)
        if cut.copies > 1 and (style.kind is not Kind.COLUMN):
            raise self._too_few(layer, shape[dim], size)
        layer.cuts[holder, attribute] = cut
        if cut.copies > 1:
            layer.partial.append((holder, attribute))

    def _cut_expert(self, layer: Layer, attribute: str, pairs: Pairs) -> None:
        pair = find_style(f"{layer.name}.{attribute}", pairs)
        parameter = layer.module._parameters[attribute]
        if pair is None or parameter is None:
            return
        style, shape = read_style(pair[1], pair[0]), tuple(parameter.shape)
        dim = len(shape) - (2 if style.kind is Kind.COLUMN else 1)
        self._check_divides(layer, shape[dim] // style.sections, self.axis.size)
        cut = cut_evenly(shape, dim, self.axis.rank, self.axis.size, sections=style.sections)
        layer.cuts[layer.module, attribute] = cut

    def _check_divides(self, layer: Layer, length: int, size: int) -> None:
        width = attention.head_width(layer.parent)
        if layer.style.sections > 1 and width is not None:
            length //= layer.style.sections * width
            if length % size:
                raise self._too_few(layer, length, size, "heads")
        if length % size:
            raise self._too_few(layer, length, size)

    def _too_few(self, layer: Layer, length: int, size: int, what: str = "features") -> PlanError:
        fitting = [number for number in range(1, min(length, 64) + 1) if length % number == 0]
        return PlanError(
            f"the {length} {what} of {layer.name!r} do not divide over tensor={size}. "
            f"Use a tensor axis of {' or '.join(map(str, fitting))}."
        )

    def _collect_cuts(self) -> dict[int, Cut]:
        found: dict[int, Cut] = {}
        for layer in self.layers:
            for (holder, attribute), cut in layer.cuts.items():
                parameter = holder._parameters[attribute]
                if found.setdefault(id(parameter), cut) != cut:
                    raise PlanError(
                        f"the parameter {attribute!r} of {layer.name!r} is tied to another layer that is cut in "
                        "another way. Give both the same cut, or untie them."
                    )
            is_cut = layer.style.kind is Kind.COLUMN and not layer.style.joins
            if layer.parent is not None and is_cut and attention.head_width(layer.parent):
                attention.check_query_heads(layer.name, layer.parent, self.axis.size)
        return found

    # -- applying ------------------------------------------------------------------------------------------------------

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
        """Takes every layer off again; parameters must be whole by then."""
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
        """One sum a block for all parameters whose gradients are parts."""
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


def _is_here(module: nn.Module) -> bool:
    """Whether a module has its parameters: other stages of a pipeline have those of their own."""
    base = layers.adapted_layers(module)[0]
    return not base._parameters or any(parameter is not None for parameter in base._parameters.values())


def _outside(module: nn.Module, regions: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it, but not regions of the whole sequence nor what lies in them."""
    if module in regions:
        return
    yield module
    for child in module.children():
        yield from _outside(child, regions)
