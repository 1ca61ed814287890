"""Takes the tensors out of a call's arguments and puts others in their place.

What is left is a template without tensors, so that keeping it keeps no device memory: containers that
`torch.utils._pytree` knows (tuples, lists, dicts, named tuples, what libraries register there) and dataclasses.
An object of any other kind is passed on unchanged, with whatever it holds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Hole:
    """Where a tensor was."""

    index: int


@dataclass(frozen=True)
class _Dataclass:
    """A dataclass without its fields, and the templates of those."""

    shell: Any
    fields: dict[str, ArgumentTemplate]


@dataclass(frozen=True)
class ArgumentTemplate:
    """Nested arguments without their tensors."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """New containers like the old ones, with `tensors` where the old ones were."""
        return pytree.tree_unflatten([_put(leaf, tensors) for leaf in self.leaves], self.spec)

    def map(self, change: Callable[[Any], Any]) -> ArgumentTemplate:
        """The same template, with `change` of everything that is left besides containers."""
        return ArgumentTemplate(tuple(_map_leaf(leaf, change) for leaf in self.leaves), self.spec)


def take_tensors(value: Any) -> tuple[list[torch.Tensor], ArgumentTemplate]:
    """The tensors inside `value`, in order, and what is left of it."""
    tensors: list[torch.Tensor] = []
    return tensors, _take(value, tensors)


def _take(value: Any, tensors: list[torch.Tensor]) -> ArgumentTemplate:
    leaves, spec = pytree.tree_flatten(value)
    return ArgumentTemplate(tuple(_take_leaf(leaf, tensors) for leaf in leaves), spec)


def _take_leaf(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return _Hole(len(tensors) - 1)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    before, fields = len(tensors), {}
    for field in dataclasses.fields(leaf):
        fields[field.name] = _take(getattr(leaf, field.name, None), tensors)
    if len(tensors) == before:
        return leaf
    return _Dataclass(_with_fields(leaf, dict.fromkeys(fields)), fields)


def _put(leaf: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, _Hole):
        return tensors[leaf.index]
    if isinstance(leaf, _Dataclass):
        return _with_fields(leaf.shell, {name: part.fill(tensors) for name, part in leaf.fields.items()})
    return leaf


def _map_leaf(leaf: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, _Hole):
        return leaf
    if isinstance(leaf, _Dataclass):
        return _Dataclass(leaf.shell, {name: part.map(change) for name, part in leaf.fields.items()})
    return change(leaf)


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    """A copy, also of a frozen dataclass, whose constructor is not called."""
    changed = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(changed, name, field)
    return changed
