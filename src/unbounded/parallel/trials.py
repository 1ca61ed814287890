"""What trials of modules need: they run a user's module once more, with random numbers, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, a module and those in it are in evaluation mode."""
    modes = [(inner, inner.training) for inner in module.modules()]
    for inner, _ in modes:
        inner.training = False
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache of keys and values, which a trial would fill."""
    return hasattr(value, "get_seq_length")


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor in what a module returned."""
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
