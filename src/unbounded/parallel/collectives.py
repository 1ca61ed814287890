"""The collectives of a parallel axis as functions of the graph: what a forward does, the backward undoes.

    function        forward                 backward
    enter           nothing                 sum over the ranks
    leave           sum over the ranks      nothing
    gather          join parts of a dim     sum, and take this rank's part
    scatter         sum, and take a part    join
    join            join parts of a dim     take this rank's part
    split           take this rank's part   join parts of a dim

`enter` and `leave` stand around a region whose ranks work on parts of the weights (Megatron's f and g), `gather` and
`scatter` around one whose neighbours work on parts of the sequence. `join` and `split` change between parts and
copies where every rank does the same with the copies. On one rank each is nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from unbounded.observe import trace
from unbounded.ranks.cut import share

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ParallelAxis(Protocol):
    """The ranks of one axis of the mesh."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...


def sum_parts(tensor: torch.Tensor, axis: ParallelAxis) -> torch.Tensor:
    """All ranks of the axis must call this. The sum over the ranks, in a tensor of its own."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    with trace.device_span("reduce", "tensor", bytes=total.numel() * total.element_size()):
        dist.all_reduce(total, group=axis.group)
    return total


def join_parts(part: torch.Tensor, dim: int, axis: ParallelAxis, length: int | None = None) -> torch.Tensor:
    """All ranks of the axis must call this. Every rank's part along `dim`; `length` of all where parts are unequal."""
    dim %= part.dim()
    if length is None or length % axis.size == 0:
        return _join_equal(part, dim, axis)
    longest = -(-length // axis.size)
    rows = part.transpose(0, dim)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    joined = _join_equal(padded, 0, axis)
    kept = []
    for rank in range(axis.size):
        start, stop = share(length, rank, axis.size)
        kept.append(joined[rank * longest : rank * longest + stop - start])
    return torch.cat(kept).transpose(0, dim).contiguous()


def _join_equal(part: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    part = part.contiguous()
    joined = part.new_empty(axis.size, *part.shape)
    with trace.device_span("gather", "tensor", bytes=joined.numel() * joined.element_size()):
        _gather_single(joined.view(-1), part.view(-1), group=axis.group)
    return joined.movedim(0, dim).reshape(*part.shape[:dim], axis.size * part.shape[dim], *part.shape[dim + 1 :])


def scatter_sum(full: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    """All ranks of the axis must call this. This rank's equal part along `dim` of the sum of all `full`."""
    dim %= full.dim()
    length = full.shape[dim] // axis.size
    rows = full.unflatten(dim, (axis.size, length)).movedim(dim, 0).contiguous()
    part = rows.new_empty(rows.shape[1:])
    with trace.device_span("reduce", "tensor", bytes=rows.numel() * rows.element_size()):
        _scatter_single(part.view(-1), rows.view(-1), group=axis.group)
    return part


def take_part(full: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    """This rank's part of `full` along `dim`."""
    start, stop = share(full.shape[dim], axis.rank, axis.size)
    return full.narrow(dim, start, stop - start).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: ParallelAxis) -> torch.Tensor:
        ctx.axis = axis
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_parts(gradient, ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: ParallelAxis) -> torch.Tensor:
        return sum_parts(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        return join_parts(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter_sum(gradient, ctx.dim, ctx.axis), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        return scatter_sum(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join_parts(gradient, ctx.dim, ctx.axis), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: ParallelAxis, length: int | None) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        return join_parts(x, dim, axis, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return take_part(gradient, ctx.dim, ctx.axis), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, x.shape[dim]
        return take_part(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join_parts(gradient, ctx.dim, ctx.axis, ctx.length), None, None


def enter(x: torch.Tensor, axis: ParallelAxis) -> torch.Tensor:
    return _Enter.apply(x, axis) if axis.size > 1 else x


def leave(x: torch.Tensor, axis: ParallelAxis) -> torch.Tensor:
    return _Leave.apply(x, axis) if axis.size > 1 else x


def gather(x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    return _Gather.apply(x, dim, axis) if axis.size > 1 else x


def scatter(x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    return _Scatter.apply(x, dim, axis) if axis.size > 1 else x


def join(x: torch.Tensor, dim: int, axis: ParallelAxis, length: int | None = None) -> torch.Tensor:
    return _Join.apply(x, dim, axis, length) if axis.size > 1 else x


def split(x: torch.Tensor, dim: int, axis: ParallelAxis) -> torch.Tensor:
    return _Split.apply(x, dim, axis) if axis.size > 1 else x
