"""Which parameters of a model are cut over the tensor axis, and how.

Everything is decided, and what cannot work is raised, from values that are the same on all ranks, before any parameter
is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.blocks import unwrap
from unbounded.parallel.tensor import attention, layers
from unbounded.parallel.tensor.families import find_pairs
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


class LayerCuts:
    """The layers that styles apply to, and the cut of every parameter that is cut, by the parameter's id."""

    def __init__(self, model: nn.Module, axis: Axis, styles: Pairs | None) -> None:
        self.base, self.axis = unwrap(model), axis
        self.names = dict(self.base.named_modules())
        self.layers = list(self._find_layers(find_pairs(model, styles)))
        self.layers += list(self._find_tied())
        self.cuts = self._collect_cuts()

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
                f"no layer of {type(self.base).__name__} matches the tensor styles: "
                f"{', '.join(repr(pattern) for pattern, _ in pairs[:4])}. Give patterns of its layer names as styles=."
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
                    f"{layer.name!r} is a {type(module).__module__}.{type(module).__name__}, but a tensor axis cuts "
                    f"only a plain nn.Embedding by the style {kind.value!r}. Train it without an adapter or a copy, or "
                    "give styles of your own that leave it out."
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
            # What the adapter adds goes in and out with the layer, so the matrix that is not cut sees a part of the
            # sum.
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
                        f"the parameter {attribute!r} of {layer.name!r} is tied to another layer that is cut "
                        "differently. Give both the same cut, or untie them."
                    )
            is_cut = layer.style.kind is Kind.COLUMN and not layer.style.joins
            if layer.parent is not None and is_cut and attention.head_width(layer.parent):
                attention.check_query_heads(layer.name, layer.parent, self.axis.size)
        return found


def _is_here(module: nn.Module) -> bool:
    """Whether this rank has the module's parameters, and not another stage of the pipeline."""
    base = layers.adapted_layers(module)[0]
    return not base._parameters or any(parameter is not None for parameter in base._parameters.values())
