"""What stages of a pipeline send each other: the tensors of a payload, and their gradients on the way back.

The structure around the tensors (tuples, shapes, dtypes) is sent once for every kind of batch; after that only bytes.
Sends return at once and are waited for at the end of the step. gloo cannot send from a GPU: there tensors go through
host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from unbounded.ranks.axis import Axis


@dataclass(frozen=True)
class Part:
    """A tensor of a payload as the receiver must know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


@dataclass
class Template:
    """A payload with a Part in place of every tensor."""

    payload: Any

    @property
    def parts(self) -> list[Part]:
        return [leaf for leaf in pytree.tree_leaves(self.payload) if isinstance(leaf, Part)]

    def fill(self, tensors: list[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        return pytree.tree_map_only(Part, lambda _: next(remaining), self.payload)


def take_apart(payload: Any) -> tuple[list[torch.Tensor], Template]:
    """The tensors of a payload, and what is left."""
    tensors = [leaf for leaf in pytree.tree_leaves(payload) if isinstance(leaf, torch.Tensor)]

    def describe(tensor: torch.Tensor) -> Part:
        return Part(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    return tensors, Template(pytree.tree_map_only(torch.Tensor, describe, payload))


class Exchange:
    """Sends and receives between this rank and others of the pipeline axis, each direction on a lane of its own."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        # Forward and backward traffic, and each of them up and down the ranks, never wait for one another.
        self._lanes = {
            (back, wraps): axis.lane(f"{'gradients' if back else 'activations'} {'down' if wraps else 'up'}")
            for back in (False, True)
            for wraps in (False, True)
        }
        self._through_host = device.type == "cuda" and dist.get_backend(axis.group) == "gloo"
        self._in_flight: list[tuple[Any, torch.Tensor]] = []
        self.sent_bytes = 0

    def send(self, tensors: list[torch.Tensor], to: int, *, back: bool) -> None:
        """Sends tensors to a rank of the axis; returns at once."""
        group = self._group(self.axis.rank, to, back)
        for tensor in tensors:
            data = tensor.detach().contiguous()
            data = data.cpu() if self._through_host else data
            self.sent_bytes += data.numel() * data.element_size()
            self._in_flight.append((dist.isend(data, self._global(to), group=group), data))

    def receive(self, parts: list[Part], source: int, *, back: bool) -> list[torch.Tensor]:
        """The tensors that a rank of the axis sends next."""
        group, tensors = self._group(source, self.axis.rank, back), []
        where = torch.device("cpu") if self._through_host else self.device
        waits: list[Any] = []
        for part in parts:
            tensor = torch.empty(part.shape, dtype=part.dtype, device=where)
            waits.append(dist.irecv(tensor, self._global(source), group=group))
            tensors.append(tensor)
        for wait in waits:
            wait.wait()
        return [tensor.to(self.device) for tensor in tensors] if self._through_host else tensors

    def send_template(self, template: Template, to: int) -> None:
        group = self._group(self.axis.rank, to, False)
        dist.send_object_list([template], self._global(to), group=group, device=self._object_device)

    def receive_template(self, source: int) -> Template:
        told: list[Any] = [None]
        group = self._group(source, self.axis.rank, False)
        dist.recv_object_list(told, self._global(source), group=group, device=self._object_device)
        return told[0]  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    @property
    def _object_device(self) -> torch.device:
        return torch.device("cpu") if self._through_host or self.device.type == "cpu" else self.device

    def _group(self, source: int, to: int, back: bool) -> dist.ProcessGroup | None:
        return self._lanes[back, source > to].group

    def _global(self, rank: int) -> int:
        return _global_rank(self.axis, rank)


def sum_among(tensor: torch.Tensor, ranks: Sequence[int], axis: Axis) -> torch.Tensor:
    """All of `ranks`, which are of the axis, must call this. The sum of their tensors, in place."""
    if len(ranks) == axis.size:
        return axis.sum(tensor)
    # No group of their own: torch names groups by how many a rank has made, so all would have to make as many.
    data = tensor.cpu() if tensor.device.type == "cuda" and dist.get_backend(axis.group) == "gloo" else tensor
    first, *others = (_global_rank(axis, rank) for rank in sorted(ranks))
    if axis.rank == min(ranks):
        part = torch.empty_like(data)
        for other in others:
            dist.recv(part, other, group=axis.group)
            data += part
        for other in others:
            dist.send(data, other, group=axis.group)
    else:
        dist.send(data, first, group=axis.group)
        dist.recv(data, first, group=axis.group)
    return tensor if data is tensor else tensor.copy_(data)


def _global_rank(axis: Axis, rank: int) -> int:
    assert axis.group is not None
    return dist.get_global_rank(axis.group, rank)
