"""Tensor parallelism of a model: the layers that compute with parts of parameters (`cutting`).

`cut` takes each rank's part of the parameters, which stay the same objects; `attach` lets the layers compute with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.attachments import Detach, together
from unbounded.parallel.blocks import find_stacks, unwrap
from unbounded.parallel.collectives import LayerSite
from unbounded.parallel.partial_gradients import Partial, attach_sum
from unbounded.parallel.recorded import records_routing
from unbounded.parallel.tensor import attention, layers
from unbounded.parallel.tensor.cutting import Layer, LayerCuts
from unbounded.parallel.tensor.dropout import attach_dropout, drops_anything
from unbounded.parallel.tensor.head.vocabulary import HeadPart, TokenLoss, attach_head
from unbounded.parallel.tensor.scene import Scene
from unbounded.parallel.tensor.sequence import SequenceBlocks
from unbounded.parallel.tensor.style_trial import Trial
from unbounded.parallel.tensor.styles import Kind, Pairs
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut

_ACTIVATIONS = ("activation", "activations")  # modules of torch and of transformers that define them


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
    ) -> None:
        self.model, self.base, self.axis = model, unwrap(model), axis
        self.scene = Scene(axis, by_sequence=sequence)
        cutting = LayerCuts(model, axis, styles)
        self.names, self.layers, self.cuts = cutting.names, cutting.layers, cutting.cuts
        found = [list(stack) for stack in (find_stacks(self.base) if stacks is None else stacks)]
        self.sequence: SequenceBlocks | None = None
        if sequence:
            records = records_routing(self.base)
            self.sequence = SequenceBlocks(self.scene, found, self.layers, self.names, records_routing=records)
        self._blocks = [block for stack in found for block in stack]
        self._rows = [layer.name for layer in self.layers if layer.style.kind is Kind.ROW]
        if styles is not None and stacks is None:
            self._check_ends()
        self.heads: dict[nn.Module, HeadPart] = {}
        self._is_given, self._trials = styles is not None, list[Trial]()
        self._detaches: list[Detach] = []
        self._trial_detaches: list[Detach] = []

    def cut(self) -> None:
        """Leaves this rank's part in every parameter that is cut. They stay the same objects."""
        if self._is_given:
            self._trials = [Trial(name, self.names[name], self.scene) for name in self._regions()]
        for parameter in {id(p): p for p in self.model.parameters()}.values():
            cut = self.cuts.get(id(parameter))
            if cut is not None:
                with torch.no_grad():
                    parameter.data = cut.take(parameter.data)

    def attach_trials(self) -> None:
        """Makes the next forward try the styles. Goes before a context axis, so that both runs see whole sequences."""
        self._trial_detaches.extend(trial.attach(self.cuts) for trial in self._trials)

    def detach_trials(self) -> None:
        for detach in reversed(self._trial_detaches):
            detach()
        self._trial_detaches.clear()

    def attach(self) -> None:
        """Lets the layers compute with the parts."""
        self._attach_layers()
        self._attach_sums()
        self._attach_activations()
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
        if self.sequence is not None:
            self._detaches.extend(self.sequence.attach())

    def _attach(self, layer: Layer) -> Detach:
        kind, module, scene, site = layer.style.kind, layer.module, self.scene, self.scene.at(layer.name)
        base = layers.adapted_layers(module)[0]
        if kind is Kind.COLUMN:
            cut = layer.cuts[base, "weight"]
            attached = layers.attach_column(module, scene, site, joins=layer.style.joins, width=cut.shape[cut.dim])
            return together(attached, layers.adjust_sizes(base, cut, is_row=False))
        if kind is Kind.ROW:
            attached = layers.attach_row(module, scene, site, splits=layer.style.splits, inner=base)
            return together(attached, layers.adjust_sizes(base, layer.cuts[base, "weight"], is_row=True))
        if kind is Kind.VOCABULARY:
            return layers.attach_vocabulary(module, scene, site, layer.cuts[module, "weight"])  # type: ignore[arg-type]
        if kind is Kind.EXPERTS:
            return layers.attach_experts(module, scene, site)
        if kind is Kind.HEAD:
            return self._attach_head(layer, layer.cuts[base, "weight"])
        return lambda: None

    def _attach_head(self, layer: Layer, cut: Cut) -> Detach:
        part = HeadPart(self.scene, self.scene.at(layer.name), cut)
        attached = attach_head(layer.module, part)
        self.heads[layer.module] = part
        if not TokenLoss.fits(self.base):
            return attached
        return together(TokenLoss(self.base, part).attach(), attached)

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

    def _regions(self) -> Iterator[str]:
        """The smallest modules with column layers and the row layers after them, one of each class.

        With sequence parallelism whole blocks: their own code may mix tokens, of which it sees a part.
        """
        known: set[type[nn.Module]] = set()
        blocks = [block for stack in self.sequence.stacks for block in stack] if self.sequence is not None else []
        names = {module: name for name, module in self.names.items()} if blocks else {}
        for block in blocks:
            if type(block) not in known:
                known.add(type(block))
                yield names[block]
        inside = tuple(f"{names[block]}." for block in blocks)
        for layer in self._columns():
            name = self._region(layer) if not layer.name.startswith(inside) else None
            # Blocks inside the model would get their own weights in its trial.
            if name is not None and (name or not self._blocks) and type(self.names[name]) not in known:
                known.add(type(self.names[name]))
                yield name

    def _columns(self) -> list[Layer]:
        """The layers that put out a part of their features."""
        return [layer for layer in self.layers if layer.style.kind is Kind.COLUMN and not layer.style.joins]

    def _region(self, column: Layer) -> str:
        """The name of the smallest module around a column layer that has a row layer too."""
        name = column.name
        while name and not (_is_called(self.names[name]) and any(row.startswith(f"{name}.") for row in self._rows)):
            name = name.rpartition(".")[0]
        return name

    def _check_ends(self) -> None:
        """Raises if nothing sums what comes of a column layer: the rows around it belong to others."""
        regions = {layer.name: self._region(layer) for layer in self._columns()}
        taken = tuple(f"{name}." for name in set(regions.values()) if name)
        free = [row for row in self._rows if not row.startswith(taken)]
        for name, region in regions.items():
            if not region and not free:
                raise PlanError(
                    f"{name!r} has the style 'column', but no row layer comes after it, so every rank would go on with "
                    "its part of the features. Give the layer after it the style 'row', or this one 'column_joined', "
                    "or 'head' if it makes logits."
                )

    def _attach_sums(self) -> None:
        """One sum per block for all parameters whose gradients are parts."""
        by_block: dict[nn.Module, dict[int, Partial]] = {}
        for name, holder, attribute in self._partial_places():
            parameter = holder._parameters.get(attribute)
            if parameter is not None:
                place = Partial(holder, attribute, self.cuts.get(id(parameter)))
                by_block.setdefault(self._block_of(name, holder), {})[id(parameter)] = place
        for block, partials in by_block.items():
            self._detaches.append(attach_sum(block, list(partials.values()), self._site(block)))

    def _attach_activations(self) -> None:
        """Activations with weights of their own (PReLU) see the features that this rank has."""
        known = {(holder, attribute) for _, holder, attribute in self._partial_places()}
        widths: dict[nn.Module, set[int]] = {}  # of regions around each, which may have one in common
        for layer in self._columns():
            cut = layer.cuts[layers.adapted_layers(layer.module)[0], "weight"]
            width = cut.local_shape[cut.dim]
            for module in filter(_is_activation, self.names[self._region(layer)].modules()):
                widths.setdefault(module, set()).update((width, width // layer.style.sections))
        for module, parts in widths.items():
            places = [Partial(module, name, None) for name in module._parameters if (module, name) not in known]
            self._detaches.append(attach_sum(module, places, self._site(module), partial(_has_width, frozenset(parts))))

    def _partial_places(self) -> Iterator[tuple[str, nn.Module, str]]:
        for layer in self.layers:
            for holder, attribute in layer.partial:
                yield layer.name, holder, attribute
        if self.sequence is not None:
            yield from self.sequence.partial_places(self.cuts)

    def _site(self, module: nn.Module) -> LayerSite:
        return self.scene.at(next(name for name, other in self.names.items() if other is module))

    def _block_of(self, name: str, holder: nn.Module) -> nn.Module:
        """The repeated block around a module, or the module."""
        found = re.match(r"(.*\.\d+)\.", name)
        return self.names.get(found.group(1), holder) if found else holder

    def _attach_dropouts(self) -> None:
        """On blocks, which may run again by themselves, and so may modules of column layers; otherwise on the model."""
        if not drops_anything(self.base):
            return
        inside = {module for block in self._blocks for module in block.modules()}
        cut = [layer for layer in self.layers if layer.style.kind in (Kind.COLUMN, Kind.ROW)]
        around = [layer.parent for layer in cut if layer.style.kind is Kind.COLUMN and layer.parent is not None]
        whole = [self.base] if any(layer.module not in inside for layer in cut) else []
        for module in dict.fromkeys([*self._blocks, *around, *whole]):
            self._detaches.append(attach_dropout(module, self.scene))


def _has_width(widths: frozenset[int], args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.dim() and arg.shape[-1] in widths for arg in args)


def _is_activation(module: nn.Module) -> bool:
    """Whether a module treats every feature alike, with trained weights."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and bool(module._parameters) and type(module).__module__.rpartition(".")[2] in _ACTIVATIONS


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, which lists and dictionaries of modules do not."""
    return type(module).forward is not nn.Module.forward
