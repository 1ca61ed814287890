"""Ranks that compute one copy of the model must be given the same batch. Otherwise they would train on a mixture.

A sampler that divides the data by all ranks instead of by the data axis is wrong from the first batch on, so only that
one is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.ranks.axis import Axis


def check_same_batch(axes: Sequence[Axis], batch: Any) -> None:
    """All ranks of the axes must call this. Raises on all of them if some have been given another batch."""
    mark, where = _mark(batch), ""
    for axis in axes:
        told = axis.objects((mark, where), "the comparison of first batches")
        where = next((text for _, text in told if text), axis.name if len({own for own, _ in told}) > 1 else "")
    if where:
        raise StateError(
            f"ranks of the {where} axis were given different batches, but they compute one copy of the model. Divide "
            "the data by the data axis alone: its rank and size are those of optimizer.engine.axes.data."
        )


def attach_check(model: nn.Module, axes: Sequence[Axis]) -> Callable[[], None]:
    """Compares what the model's next forward is given; the returned function ends that."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        check_same_batch(axes, (args, kwargs))

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    return handle.remove


def _mark(batch: Any) -> int:
    mark = 0
    for leaf in pytree.tree_leaves(batch):
        if type(leaf) is torch.Tensor and not leaf.is_meta:
            data = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
            mark = zlib.crc32(data.numpy().data, zlib.crc32(str(tuple(leaf.shape)).encode(), mark))
    return mark
