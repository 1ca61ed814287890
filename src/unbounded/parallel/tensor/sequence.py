"""Sequence parallelism: how much of the sequence each module inside the blocks sees.

    a part    layers that look at each token alone (norms, dropout, routing), and everything between the modules
    gathered  modules around column layers: parts are gathered as they enter, and their sum is scattered by a row layer
    whole     modules that may mix tokens and are not cut: every rank runs them alike, on the whole sequence

What is not known to look at each token alone runs whole, so that a module which this file has never heard of is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.attachments import Detach, together
from unbounded.parallel.blocks import change_hidden
from unbounded.parallel.tensor import layers
from unbounded.parallel.tensor.cutting import Layer
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.parallel.tensor.styles import Kind


class SequenceBlocks:
    """The blocks of a model whose sequences are cut over the tensor axis."""

    def __init__(
        self,
        scene: Scene,
        stacks: Sequence[list[nn.Module]],
        cut: Sequence[Layer],
        names: dict[str, nn.Module],
        *,
        records_routing: bool,
    ) -> None:
        if not stacks:
            raise PlanError("sequence=True needs repeated blocks, but the model has none. Leave it out of the plan.")
        self.scene, self.stacks = scene, stacks
        self._names = {module: name for name, module in names.items()}
        self._records_routing = records_routing
        self._layers = {layer.module: layer for layer in cut}
        self._around = {layer.parent for layer in cut if layer.style.kind is Kind.COLUMN and layer.parent is not None}
        self.gathered: list[nn.Module] = []
        self.whole: list[nn.Module] = []
        for stack in self.stacks:
            for block in stack:
                for child in block.children():
                    self._sort(child)

    def _sort(self, module: nn.Module) -> None:
        """Decides for a module inside a block and for those inside it."""
        routed = [child for child in module.children() if self._is_experts(child)]
        if module in self._layers or module in self.gathered or module in self.whole:
            return
        if module in self._around:
            (self.whole if self._has_uncut_matrix(module) else self.gathered).append(module)
        elif routed and (self._records_routing or any(map(_takes_expert_after_expert, routed))):
            self.whole.append(module)
        elif self._has_cut_layer(module):
            for child in module.children():
                if not routed or self._has_cut_layer(child):  # a router looks at each token alone
                    self._sort(child)
        elif not looks_at_tokens_alone(module):
            self.whole.append(module)

    def _is_experts(self, module: nn.Module) -> bool:
        return module in self._layers and self._layers[module].style.kind is Kind.EXPERTS

    def _has_cut_layer(self, module: nn.Module) -> bool:
        return any(inner in self._layers for inner in module.modules())

    def _has_uncut_matrix(self, module: nn.Module) -> bool:
        """Whether something in it computes with the whole of its weights, beside layers that are cut."""
        return any(
            parameter is not None and parameter.dim() > 1
            for inner in outside(module, self._layers)
            for parameter in inner._parameters.values()
        )

    def attach(self) -> Iterator[Detach]:
        """Makes every module see what was decided."""
        for stack in self.stacks:
            for block in stack:
                yield self._attach_block(block, is_first=block is stack[0], is_last=block is stack[-1])
        for module in self.gathered:
            yield self._attach_gathered(module)
        for module in self.whole:
            yield self._attach_whole(module)

    def partial_places(self, cuts: dict[int, Any]) -> Iterator[tuple[str, nn.Module, str]]:
        """Parameters that each rank uses on its part of the sequence alone, by name, holder and attribute."""
        seeing_all = {*self.gathered, *self.whole}
        for stack in self.stacks:
            for block in stack:
                for module in outside(block, seeing_all):
                    for attribute, parameter in module._parameters.items():
                        if id(parameter) not in cuts:
                            yield self._name_inside(block, module), module, attribute
                for module in outside(block, self.whole):
                    layer = self._layers.get(module)
                    if layer is not None and layer.style.kind is Kind.ROW:
                        base = layers.adapted_layers(module)[0]
                        if "bias" in base._parameters:
                            yield self._names[base], base, "bias"

    def _name_inside(self, block: nn.Module, module: nn.Module) -> str:
        """A module's name in a block, which may share it with others."""
        own, around = self._names[module], f"{self._names[block]}."
        return own if own.startswith(around) else f"{around}{type(module).__name__}"

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _attach_block(self, block: nn.Module, *, is_first: bool, is_last: bool) -> Detach:
        scene, site = self.scene, self.scene.at(self._names[block])

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return change_hidden(block, args, kwargs, lambda x: scene.begin_block(x, site, is_first=is_first))

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return scene.end_block(output, site, is_last=is_last)

        handles = [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after, prepend=True, always_call=True),  # inside the engine's own
        ]
        return together(*(handle.remove for handle in handles))

    def _attach_gathered(self, module: nn.Module) -> Detach:
        scene, site = self.scene, self.scene.at(self._names[module])

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if scene.hold is not Hold.SEQUENCE:
                return None
            return change_hidden(module, args, kwargs, lambda x: scene.gather_sequence(x, site))

        return module.register_forward_pre_hook(before, with_kwargs=True).remove

    def _attach_whole(self, module: nn.Module) -> Detach:
        scene, site = self.scene, self.scene.at(self._names[module])
        is_joined = False

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal is_joined
            is_joined = scene.hold is Hold.SEQUENCE
            if not is_joined:
                return None
            return change_hidden(module, args, kwargs, lambda x: scene.begin_whole(x, site))

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return scene.end_whole(output, site) if is_joined else None

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, prepend=True),
        ]
        return together(*(handle.remove for handle in handles))


def outside(module: nn.Module, regions: Any) -> Iterator[nn.Module]:
    """A module and those inside it, but not `regions` nor what lies in them. Cut layers themselves are given."""
    if module in regions:
        return
    yield module
    for child in module.children():
        yield from outside(child, regions)


def looks_at_tokens_alone(module: nn.Module) -> bool:
    """Whether a module that is not cut is known to compute each token's output from that token."""
    if isinstance(module, (nn.Linear, nn.Embedding)) or layers.is_transposed(module):
        return True
    if isinstance(module, nn.modules.batchnorm._NormBase) or next(module.children(), None) is not None:
        return False
    return all(parameter is None or parameter.dim() < 2 for parameter in module._parameters.values())


def _takes_expert_after_expert(experts: nn.Module) -> bool:
    """Whether tokens come sorted by experts, without routing: their order says which expert each is for."""
    return len(inspect.signature(type(experts).forward).parameters) == 2  # self and the tokens
