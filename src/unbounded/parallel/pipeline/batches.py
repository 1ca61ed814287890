"""Cuts a batch into micro-batches: every tensor of its length is cut along its first dim, all get everything else.

The loss of a batch is the mean over its counted labels, so each micro-batch is weighted by its number of them. If the
caller says by `num_items_in_batch` what the model divides a sum by, the losses of micro-batches add up as they are. A
model's own loss over several kinds of labels has no such weight, unless all micro-batches count alike.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.parallel.blocks import asked_loss, unwrap
from unbounded.parallel.same_batch import autocast_dtypes

IGNORED = -100


@dataclass
class Micro:
    """The arguments of the model for one micro-batch, and its part of the batch's loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weight: float


def cut_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_micros: int,
    *,
    shifts: bool,
    is_own: bool,
    place: int | None = None,
) -> list[Micro]:
    """The micro-batches of a batch. `shifts` says that the first label of every row is not counted, `is_own` that the
    loss is the model's own, and `place` where labels are in `args`, if they are there."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not tensors:
        raise StateError("the pipeline was called without tensors to cut into micro-batches. Call it with a batch.")
    rows = tensors[0].shape[0]
    if rows % num_micros:
        raise StateError(
            f"the batch has {rows} rows, which do not divide into microbatches={num_micros}. "
            f"Give a batch of a multiple of {num_micros} rows, or another number of micro-batches."
        )
    size = rows // num_micros

    def part(leaf: Any, number: int) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return leaf[number * size : (number + 1) * size] if is_cut else leaf

    cut = [pytree.tree_unflatten([part(leaf, i) for leaf in leaves], structure) for i in range(num_micros)]
    if kwargs.get("num_items_in_batch") is not None:  # what the model divides a sum by: its losses add up
        return [Micro(args, dict(kwargs), 1.0) for args, kwargs in cut]
    if place is None or place >= len(args) or "labels" in kwargs:
        place = None
    labels = [kwargs.get("labels") if place is None else args[place] for args, kwargs in cut]
    counts = [_count_labels(part, shifts=shifts) for part in labels]
    total = sum(counts)
    others = [name for name in kwargs if name.endswith(("_label", "_labels")) and kwargs[name] is not None]
    if is_own and others and len(set(counts)) > 1:
        raise StateError(
            f"micro-batches have {min(counts)} to {max(counts)} counted labels, but the loss is also a mean over "
            f"{others[0]!r}, so no weight is right for both. Mask as many labels in every micro-batch, or use "
            "microbatches=1 with the schedule 'gpipe'."
        )
    for number, (args, kwargs) in enumerate(cut):
        if total and not counts[number]:  # weighs nothing, but a mean over no labels would be NaN
            zeros = torch.zeros_like(labels[number])
            if place is None:
                kwargs["labels"] = zeros
            else:
                cut[number] = (*args[:place], zeros, *args[place + 1 :]), kwargs
    return [
        Micro(args, dict(kwargs), count / total if total else 1 / num_micros)
        for (args, kwargs), count in zip(cut, counts, strict=True)
    ]


def choose_count(batch: Any, num_ranks: int) -> int:
    """How many micro-batches, if the plan does not say: two for every stage if the batch divides so, otherwise one."""
    rows = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim() > 0), 0)
    return 2 * num_ranks if rows % (2 * num_ranks) == 0 else num_ranks


def _count_labels(labels: Any, *, shifts: bool) -> int:
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return 1
    counted = labels[..., 1:] if shifts and labels.dim() > 1 else labels
    return int((counted != IGNORED).sum())


def signature(micro: Micro) -> tuple[Any, ...]:
    """What determines the shapes of everything that stages exchange."""
    leaves = pytree.tree_leaves((micro.args, micro.kwargs))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    switches = tuple(leaf for leaf in leaves if isinstance(leaf, (bool, str)))
    return (*shapes, tuple(sorted(micro.kwargs)), switches, torch.is_grad_enabled(), *autocast_dtypes().items())


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's loss compares every label with the token before it, so that the first one is not counted.

    It is where peft puts virtual tokens before a row's own (prompt tuning, p-tuning).
    """
    adapter: Any = getattr(model, "active_peft_config", None)
    prepends = getattr(adapter, "is_prompt_learning", False) and adapter.peft_type != "PREFIX_TUNING"
    return asked_loss(unwrap(model)) == "ForCausalLMLoss" and not prepends


def find_argument(model: nn.Module, name: str) -> int | None:
    """Where a model's forward takes the argument of that name; None if it has none."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return names.index(name) if name in names else None


def read_loss(result: Any) -> torch.Tensor:
    """The loss in what a model returned: its `loss`, or the scalar itself."""
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StateError(
            f"the model returned a {type(result).__name__} without a scalar loss. Put labels into the batch, or say "
            "how to compute the loss: unbounded.pipeline(model, loss=lambda output, batch: ...)."
        )
    return loss
