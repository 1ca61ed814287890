"""Activation policies of a model: what was attached, and how to remove it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unbounded.activations.checkpointed import Checkpointed, attached_to, is_switched_on
from unbounded.activations.headroom import Headroom
from unbounded.activations.offload.shelf import Shelf
from unbounded.activations.tiled.feedforward import FeedForward, Sizes
from unbounded.errors import PlanError
from unbounded.own_hook import OwnHook


class Activations:
    """The blocks of one model that have a policy other than "keep". `remove` removes the policies."""

    def __init__(self, model: nn.Module, blocks: list[Checkpointed]) -> None:
        self.blocks = blocks
        for block in blocks:
            block.attach()
        self._handle = model.register_forward_pre_hook(_Renewal(self)) if blocks else None

    def remove(self) -> None:
        """Leaves the model as it was. Backwards still to come are not affected."""
        self.leave_out(self.blocks)

    def leave_out(self, blocks: Sequence[Checkpointed]) -> None:
        """Removes the policies of these blocks."""
        for block in blocks:
            block.detach()
            block.shelf.buffers.trim()
        self.blocks = [block for block in self.blocks if block not in blocks]
        if self._handle is not None and not self.blocks:
            self._handle.remove()
            self._handle = None

    def renew(self) -> None:
        """A forward of the model begins."""
        for block in self.blocks:
            block.renew()
        for headroom in {block.headroom for block in self.blocks if block.headroom is not None}:
            headroom.begin()

    def __repr__(self) -> str:
        counts = Counter(block.policy for block in self.blocks)
        return f"Activations({', '.join(f'{policy}: {count} blocks' for policy, count in counts.items())})"


class _Renewal(OwnHook):
    """The hook by which a model has its policies."""

    def __init__(self, activations: Activations) -> None:
        super().__init__(self._begin)
        self.activations = activations

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.activations.renew()


def activations_of(model: nn.Module) -> list[Activations]:
    """The policies that were attached to a model and to parts of it."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook.activations for hook in hooks if isinstance(hook, _Renewal)]


def attach_policies(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    policies: Mapping[str, str],
    shelf: Shelf,
    make_headroom: Callable[[int], Headroom],
    feed_forwards: Mapping[str, Sequence[nn.Module]],
    sizes: Sizes,
) -> Activations:
    """Puts every block under its policy; one that was left to "auto" may get another. They share a shelf and headroom.

    `feed_forwards` are layers of blocks that run over tiles of the sequence if they would take more than `sizes`.

    Under "auto" ranks decide alone, so a block whose forward waits for other ranks keeps its activations.
    """
    chosen = {
        name: policy
        for name, policy in policies.items()
        if policy != "keep" and not (policy == "auto" and _meets_ranks(blocks[name]))
    }
    named, attached = {id(block) for block in blocks.values()}, attached_to(model)
    replaced = [block for block in attached if block.policy == "auto" and id(block.module) in named]
    taken = {id(block.module): block.policy for block in attached if block not in replaced}
    for name in chosen:
        if id(blocks[name]) in taken:
            raise PlanError(
                f"block {name!r} already has the activation policy {taken[id(blocks[name])]!r}. "
                "First call remove() on what checkpoint_activations returned."
            )
    if any(is_switched_on(module) for module in model.modules()):
        if "host" in chosen.values():
            raise PlanError(
                "the model's own gradient checkpointing is on, which keeps the inputs of blocks on the device, but "
                'the activation policy is "host". Call model.gradient_checkpointing_disable() first.'
            )
        chosen = {}  # is recomputed anyway
    for earlier in activations_of(model):
        earlier.leave_out([block for block in earlier.blocks if block in replaced])
    for block in replaced:  # by policies of a model around this one
        block.detach()
    num_auto = sum(policy == "auto" for policy in chosen.values())
    headroom = make_headroom(num_auto) if num_auto else None
    return Activations(
        model,
        [
            Checkpointed(
                name,
                blocks[name],
                policy,
                shelf,
                headroom if policy == "auto" else None,
                [FeedForward(layer, sizes) for layer in feed_forwards.get(name, ())],
            )
            for name, policy in chosen.items()
        ],
    )


def _meets_ranks(block: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in block.modules())
