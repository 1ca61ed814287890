"""Gradients of parameters that several stages of a pipeline hold: summed before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unbounded.zero.parameters.parameter import ManagedParameter


def sum_copies(parameters: Sequence[torch.nn.Parameter], add_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every rank that holds copies of `parameters` must call this, before gradients are reduced.

    `add_up` sums a tensor over these ranks. A rank that did not use one counts as zero; one that nobody used keeps no
    gradient.
    """
    held = [p for p in parameters if isinstance(p, ManagedParameter) and p._unit.trainable]
    if not held:
        return
    views = [_local(parameter) for parameter in held]
    uses = [p._unit.gradient.used[p._index] for p in held]
    flags = torch.tensor(uses, dtype=torch.float32, device=views[0].device)
    total = add_up(torch.cat([flags, *(view.reshape(-1).float() for view in views)]))
    used, position = total[: len(held)].tolist(), len(held)
    for parameter, view, is_used in zip(held, views, used, strict=True):
        if is_used:
            view.copy_(total[position : position + view.numel()].view(view.shape))
            gradient = parameter._unit.gradient
            gradient.mark_used(is_there or i == parameter._index for i, is_there in enumerate(gradient.used))
        position += view.numel()


def leave_to_first(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Every rank but the first that holds copies must call this before a batch.

    All of them have what `sum_copies` added up in earlier batches and was not reduced since. This counts it once.
    """
    for parameter in parameters:
        if isinstance(parameter, ManagedParameter) and parameter._unit.gradient.local is not None:
            _local(parameter).zero_()


def _local(parameter: ManagedParameter) -> torch.Tensor:
    """This rank's gradient of a parameter that waits for its reduction, to be written to."""
    unit = parameter._unit
    return unit.slot_views(unit.gradient.open_local(unit.dtype))[parameter._index]
