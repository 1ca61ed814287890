"""The collectives of a parallel axis as differentiable functions: the backward reverses what the forward does.

    function        forward                 backward
    enter           nothing                 sum over the ranks
    leave           sum over the ranks      nothing
    gather          join parts of a dim     sum, and take this rank's part
    scatter         sum, and take a part    join
    join            join parts of a dim     take this rank's part
    split           take this rank's part   join parts of a dim

`enter` and `leave` stand around a region whose ranks work on parts of the weights (Megatron's f and g), `gather` and
`scatter` around one whose neighbours work on parts of the sequence. `join` and `split` change between parts and
copies if every rank does the same with the copies. On one rank, each does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from unbounded.observe import trace
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import share


class LayerSite:
    """A layer on the ranks of an axis: where its collectives happen, and their name for when a rank is late."""

    def __init__(self, axis: Axis, layer: str) -> None:
        self.axis, self.layer = axis, layer
        self.size, self.rank = axis.size, axis.rank
        self.output, self.gradient = f"layer {layer!r}", f"the gradient of layer {layer!r}"


def sum_parts(tensor: torch.Tensor, site: LayerSite, subject: str) -> torch.Tensor:
    """All ranks of the axis must call this. The sum over the ranks, in a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    with trace.device_span("reduce", site.layer, bytes=total.numel() * total.element_size()):
        return site.axis.sum(total, f"the sum of {subject}")


def join_parts(part: torch.Tensor, dim: int, site: LayerSite, subject: str, length: int | None = None) -> torch.Tensor:
    """All ranks of the axis must call this. Joins the parts along `dim`; `length` is the total of unequal parts."""
    dim %= part.dim()
    if length is None or length % site.size == 0:
        return _join_equal(part, dim, site, subject)
    longest = -(-length // site.size)
    rows = part.transpose(0, dim)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    joined = _join_equal(padded, 0, site, subject)
    kept = []
    for rank in range(site.size):
        start, stop = share(length, rank, site.size)
        kept.append(joined[rank * longest : rank * longest + stop - start])
    return torch.cat(kept).transpose(0, dim).contiguous()


def _join_equal(part: torch.Tensor, dim: int, site: LayerSite, subject: str) -> torch.Tensor:
    part = part.contiguous()
    joined = part.new_empty(site.size, *part.shape)
    site.axis.gather(joined.view(-1), part.view(-1), site.layer, subject)
    return joined.movedim(0, dim).reshape(*part.shape[:dim], site.size * part.shape[dim], *part.shape[dim + 1 :])


def scatter_sum(full: torch.Tensor, dim: int, site: LayerSite, subject: str) -> torch.Tensor:
    """All ranks of the axis must call this. This rank's equal part along `dim` of the sum of all `full`."""
    dim %= full.dim()
    length = full.shape[dim] // site.size
    rows = full.unflatten(dim, (site.size, length)).movedim(dim, 0).contiguous()
    part = rows.new_empty(rows.shape[1:])
    site.axis.scatter(part.view(-1), rows.view(-1), site.layer, subject)
    return part


def exchange_parts(parts: torch.Tensor, site: LayerSite, subject: str) -> torch.Tensor:
    """All ranks of the axis must call this. What each rank has for this one, in the rows of `parts`."""
    received = torch.empty_like(parts)
    site.axis.exchange(received, parts, site.layer, subject)
    return received


def take_part(full: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
    """This rank's part of `full` along `dim`."""
    start, stop = share(full.shape[dim], site.rank, site.size)
    return full.narrow(dim, start, stop - start).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, site: LayerSite) -> torch.Tensor:
        ctx.site = site
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_parts(gradient, ctx.site, ctx.site.gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, site: LayerSite) -> torch.Tensor:
        return sum_parts(x, site, site.output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
        ctx.dim, ctx.site = dim, site
        return join_parts(x, dim, site, site.output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter_sum(gradient, ctx.dim, ctx.site, ctx.site.gradient), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
        ctx.dim, ctx.site = dim, site
        return scatter_sum(x, dim, site, site.output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join_parts(gradient, ctx.dim, ctx.site, ctx.site.gradient), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, site: LayerSite, length: int | None) -> torch.Tensor:
        ctx.dim, ctx.site = dim, site
        return join_parts(x, dim, site, site.output, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return take_part(gradient, ctx.dim, ctx.site), None, None, None


class _SplitCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
        ctx.dim, ctx.site, ctx.length = dim, site, x.shape[dim]
        return take_part(x, dim, site)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join_parts(gradient, ctx.dim, ctx.site, ctx.site.gradient, ctx.length), None, None


def enter(x: torch.Tensor, site: LayerSite) -> torch.Tensor:
    return _Enter.apply(x, site) if site.size > 1 else x


def leave(x: torch.Tensor, site: LayerSite) -> torch.Tensor:
    return _Leave.apply(x, site) if site.size > 1 else x


def gather(x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
    return _Gather.apply(x, dim, site) if site.size > 1 else x


def scatter(x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
    return _Scatter.apply(x, dim, site) if site.size > 1 else x


def join(x: torch.Tensor, dim: int, site: LayerSite, length: int | None = None) -> torch.Tensor:
    return _Join.apply(x, dim, site, length) if site.size > 1 else x


def split(x: torch.Tensor, dim: int, site: LayerSite) -> torch.Tensor:
    return _SplitCopy.apply(x, dim, site) if site.size > 1 else x
