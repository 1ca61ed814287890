"""What stages of a pipeline send each other: the tensors of a payload, and their gradients on the way back.

The structure around the tensors (tuples, shapes, dtypes) is sent once for every kind of batch; after that only bytes.
Sends return at once and are waited for at the end of the step. gloo cannot send from a GPU, so there tensors go
through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from unbounded.ranks.axis import Axis
from unbounded.ranks.wire import Wire


@dataclass(frozen=True)
class TensorSpec:
    """What the receiver must know of a tensor in a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


@dataclass
class Template:
    """A payload with a TensorSpec in place of every tensor."""

    payload: Any

    @property
    def parts(self) -> list[TensorSpec]:
        return [leaf for leaf in pytree.tree_leaves(self.payload) if isinstance(leaf, TensorSpec)]

    def fill(self, tensors: list[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        return pytree.tree_map_only(TensorSpec, lambda _: next(remaining), self.payload)


def take_apart(payload: Any) -> tuple[list[torch.Tensor], Template]:
    """The tensors of a payload, and what is left."""
    tensors = [leaf for leaf in pytree.tree_leaves(payload) if isinstance(leaf, torch.Tensor)]

    def describe(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    return tensors, Template(pytree.tree_map_only(torch.Tensor, describe, payload))


class StageExchange:
    """Sends and receives between this rank and others of the pipeline axis, each direction on its own lane."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        # Forward and backward traffic, and each of them up and down the ranks, never wait for one another.
        self._wires = {
            (back, wraps): Wire(axis.lane(f"{'gradients' if back else 'activations'} {'down' if wraps else 'up'}"))
            for back in (False, True)
            for wraps in (False, True)
        }
        self._where = _travelling_device(device, axis)

    def send(self, tensors: list[torch.Tensor], to: int, *, stage: int, back: bool) -> None:
        """Sends what `stage` made to a rank of the axis; returns at once."""
        for tensor in tensors:
            data = tensor.detach().contiguous().to(self._where)
            self._wire(self.axis.rank, to, back).send(data, to, _describe(stage, back))

    def receive(self, parts: list[TensorSpec], source: int, *, stage: int, back: bool) -> list[torch.Tensor]:
        """The tensors that `stage`, on a rank of the axis, sends next."""
        tensors = [torch.empty(part.shape, dtype=part.dtype, device=self._where) for part in parts]
        self._wire(source, self.axis.rank, back).receive(tensors, source, _describe(stage, back))
        return [tensor.to(self.device) for tensor in tensors]

    def send_template(self, template: Template, to: int, *, stage: int) -> None:
        wire, subject = self._wire(self.axis.rank, to, False), f"the structure of {_describe(stage, False)}"
        wire.send_object(template, to, subject, self._where)

    def receive_template(self, source: int, *, stage: int) -> Template:
        wire, subject = self._wire(source, self.axis.rank, False), f"the structure of {_describe(stage, False)}"
        template: Template = wire.receive_object(source, subject, self._where)
        return template

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for wire in self._wires.values():
            wire.finish()

    def _wire(self, source: int, to: int, back: bool) -> Wire:
        return self._wires[back, source > to]


def sum_among(tensor: torch.Tensor, ranks: Sequence[int], wire: Wire) -> torch.Tensor:
    """All of `ranks`, which are of the wire's axis, must call this. The sum of their tensors, in place."""
    axis, what = wire.axis, "parameters that several stages hold"
    if len(ranks) == axis.size:
        return axis.sum(tensor, f"the sum of {what}")
    # Not in their own group: torch numbers groups by how many a rank has made, so all ranks would have to make as many.
    data = tensor.to(_travelling_device(tensor.device, axis))
    first, *others = sorted(ranks)
    if axis.rank == first:
        part = torch.empty_like(data)
        for other in others:
            wire.receive([part], other, what)
            data += part
        for other in others:
            wire.send(data, other, what)
    else:
        wire.send(data, first, what)
        wire.finish()  # before it is overwritten
        wire.receive([data], first, what)
    wire.finish()
    return tensor if data is tensor else tensor.copy_(data)


def _describe(stage: int, back: bool) -> str:
    return f"the {'gradients' if back else 'activations'} of stage {stage}"


def _travelling_device(device: torch.device, axis: Axis) -> torch.device:
    """Where tensors are sent from and received: gloo does neither on a GPU."""
    through_host = device.type == "cuda" and dist.get_backend(axis.group) == "gloo"
    return torch.device("cpu") if through_host else device
