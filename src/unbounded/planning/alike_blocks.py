"""Blocks of a model that do the same: after two of them have run, the others give what those gave.

They are alike if they have the same classes, parameters and settings, are given the same, and two of them did the same.
(The first block of a model may keep what all of them share.) This is for models on the meta device, whose outputs have
sizes and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = (bool, int, float, str, type(None))


def find_alike(blocks: Mapping[str, nn.Module]) -> dict[str, Hashable]:
    """For every block, what it has in common with those that are alike."""
    return {name: _describe(name, module) for name, module in blocks.items()}


def _describe(name: str, block: nn.Module) -> Hashable:
    position = next((part for part in reversed(name.split(".")) if part.isdecimal()), "")

    def settings(module: nn.Module) -> Hashable:
        said = ((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN))
        # blocks may know their number, or those of the caches of what is inside
        return tuple(
            (key, value) for key, value in said if str(value) != position and not key.endswith(("idx", "index"))
        )

    def parameters(module: nn.Module) -> Hashable:
        own = module.named_parameters(recurse=False)
        return tuple((key, one.shape, one.dtype, one.requires_grad) for key, one in own)

    return tuple((inner, type(module), settings(module), parameters(module)) for inner, module in block.named_modules())


class Repeats:
    """What blocks gave in a forward, for those that are alike and are given the same."""

    def __init__(self, alike: Mapping[str, Hashable]) -> None:
        self._alike = alike
        self._given: dict[Hashable, tuple[list[Any], Any, Any]] = {}
        self._agreed: set[Hashable] = set()

    def remember(self, name: str, taken: Any, given: Any, did: Any) -> None:
        """`given` is what the block made of `taken`, and `did` whatever else is to be known of that."""
        leaves = tree_leaves(taken)
        passed = set(map(id, leaves))
        made = [leaf for leaf in tree_leaves(given) if id(leaf) not in passed]
        if name in self._alike and all(map(_is_nothing_but_sizes, made)):
            key = self._key(name, leaves)
            if key in self._given and self._given[key][-1] == did:
                self._agreed.add(key)
            self._given[key] = leaves, given, did

    def recall(self, name: str, taken: Any) -> tuple[Any, Any] | None:
        """What a block would give, and what those that are alike did for it; None if no two of them have run."""
        leaves = tree_leaves(taken)
        if name not in self._alike or (key := self._key(name, leaves)) not in self._agreed:
            return None
        before, given, did = self._given[key]
        passed = {id(old): new for old, new in zip(before, leaves, strict=True)}
        return tree_map(lambda leaf: passed[id(leaf)] if id(leaf) in passed else _like(leaf), given), did

    def _key(self, name: str, leaves: list[Any]) -> Hashable:
        return self._alike[name], tuple(map(_sketch, leaves))


def _sketch(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__qualname__


def _is_nothing_but_sizes(leaf: Any) -> bool:
    return leaf is None or (isinstance(leaf, torch.Tensor) and leaf.is_meta)


def _like(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None:
        return None
    made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_().clone() if leaf.requires_grad else made
