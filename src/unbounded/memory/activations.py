"""Activation policies of a model: what was attached, and how to take it off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.memory.checkpointed import Checkpointed, attached_to, is_switched_on
from unbounded.memory.shelf import Shelf


class Activations:
    """The blocks of one model that are recomputed in the backward. `remove` takes the policies off."""

    def __init__(self, model: nn.Module, blocks: list[Checkpointed]) -> None:
        self.blocks = blocks
        for block in blocks:
            block.attach()

        def renew(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                for block in blocks:
                    block.renew()

        self._handle = model.register_forward_pre_hook(renew) if blocks else None

    def remove(self) -> None:
        """Leaves the model as it was. A backward that is still to come is not affected."""
        for block in self.blocks:
            block.detach()
            if block.shelf is not None:
                block.shelf.buffers.trim()
        if self._handle is not None:
            self._handle.remove()
        self.blocks, self._handle = [], None

    def __repr__(self) -> str:
        counts = Counter(block.policy for block in self.blocks)
        return f"Activations({', '.join(f'{policy}: {count} blocks' for policy, count in counts.items())})"


def attach_policies(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    policies: Mapping[str, str],
    make_shelf: Callable[[], Shelf],
) -> Activations:
    """Puts every block under its policy. Blocks on the host share one shelf, made where there is one."""
    chosen = {name: policy for name, policy in policies.items() if policy != "keep"}
    taken = {id(block.module): block.policy for block in attached_to(model)}
    for name in chosen:
        if id(blocks[name]) in taken:
            raise PlanError(
                f"block {name!r} already has the activation policy {taken[id(blocks[name])]!r}. "
                "Call remove() on what checkpoint_activations returned first."
            )
    if any(is_switched_on(module) for module in model.modules()):
        if "host" in chosen.values():
            raise PlanError(
                "the model's own gradient checkpointing is on, which keeps the inputs of blocks on the device, but "
                'the activation policy is "host". Call model.gradient_checkpointing_disable() first.'
            )
        chosen = {}  # recomputed as it is
    shelf = make_shelf() if "host" in chosen.values() else None
    return Activations(
        model,
        [
            Checkpointed(name, blocks[name], policy, shelf if policy == "host" else None)
            for name, policy in chosen.items()
        ],
    )
