"""Gradients of parameters that several ranks hold and use on different data: summed over the tensor axis.

Norms see a part of the sequence each, norms of heads a part of the heads, and a key head that several ranks hold a part
of the queries. While a block runs, its modules hold such parameters as outputs of one function, whose backward sums all
of them in one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unbounded.parallel.attachments import Detach, together
from unbounded.parallel.collectives import LayerSite, sum_parts
from unbounded.ranks.cut import Cut


@dataclass(frozen=True)
class Partial:
    """A parameter whose gradient is a part of the sum on each rank: its place, and its cut if it has one."""

    holder: nn.Module
    attribute: str
    cut: Cut | None


class _Summed(torch.autograd.Function):
    """Parameters as they are; the backward sums their gradients over the axis."""

    @staticmethod
    def forward(
        ctx: Any, site: LayerSite, cuts: Sequence[Cut | None], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.site, ctx.cuts = site, cuts
        ctx.set_materialize_grads(False)
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """A parameter that no rank has used gets no gradient. What each has used is summed with the rest."""
        unused = [place for place, gradient in enumerate(gradients) if gradient is None]
        parts = [
            _spread(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient, cut)
            for (shape, dtype, device), gradient, cut in zip(ctx.like, gradients, ctx.cuts, strict=True)
        ]
        uses = parts[0].new_ones(len(parts))
        for place in unused:
            uses[place] = 0
        total = sum_parts(torch.cat([*(part.reshape(-1) for part in parts), uses]), ctx.site, ctx.site.gradient)
        found: list[torch.Tensor | None] = []
        position = 0
        for part, cut in zip(parts, ctx.cuts, strict=True):
            whole = total[position : position + part.numel()].view(part.shape)
            position += part.numel()
            found.append(whole if cut is None else cut.take(whole))
        for place in unused:  # only then is a device waited for
            if not total[position + place]:
                found[place] = None
        return None, None, *found


def _spread(gradient: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """The gradient at its place in the whole parameter, of which other ranks have other parts."""
    if cut is None:
        return gradient
    whole = gradient.new_zeros(cut.shape)
    cut.put(whole, gradient)
    return whole


def attach_sum(
    block: nn.Module,
    partials: Sequence[Partial],
    site: LayerSite,
    is_part: Callable[[tuple[Any, ...]], bool] = lambda args: True,
) -> Detach:
    """Sums the gradients of `partials` in one collective while `block` runs, on arguments of which this is a part."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_part(args):
            return
        held = [partial.holder._parameters[partial.attribute] for partial in partials]
        wanted = [i for i, parameter in enumerate(held) if parameter is not None and parameter.requires_grad]
        if not wanted or not torch.is_grad_enabled():
            return
        cuts = [partials[i].cut for i in wanted]
        summed = _Summed.apply(site, cuts, *(held[i] for i in wanted))
        for i, value in zip(wanted, summed, strict=True):
            replaced.append((partials[i].holder, partials[i].attribute, held[i]))
            partials[i].holder._parameters[partials[i].attribute] = value

    def after(*_: Any) -> None:
        for holder, attribute, value in replaced:
            holder._parameters[attribute] = value
        replaced.clear()

    replaced: list[tuple[nn.Module, str, Any]] = []
    handles = [
        block.register_forward_pre_hook(before),
        block.register_forward_hook(after, prepend=True, always_call=True),  # before the engine removes its views
    ]
    return together(*(handle.remove for handle in handles))
