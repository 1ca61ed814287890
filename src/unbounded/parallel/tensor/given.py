"""Parameters that torch's `parallelize_module` made DTensors: they are accepted as they are.

The engine keeps the local tensor of each. While a module runs it holds DTensors again, made from what the engine gives
it, with their old placements, so that torch's own hooks and operators do what they would have done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from unbounded.errors import PlanError
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut


def find_given(model: nn.Module) -> dict[str, DTensor]:
    """The parameters of a model that are DTensors, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


class GivenTensors:
    """The DTensors of a model, with the cuts that their placements are."""

    def __init__(self, model: nn.Module, given: dict[str, DTensor], axis: Axis) -> None:
        self.model = model
        self._specs = {id(tensor): (tensor.device_mesh, tuple(tensor.placements)) for tensor in given.values()}
        self._shapes = {id(tensor): (tensor.shape, tensor.stride()) for tensor in given.values()}
        self.cuts: dict[int, Cut] = {}
        for name, tensor in given.items():
            cut = _read_cut(name, tensor, axis)
            if cut is not None:
                self.cuts[id(tensor)] = cut
        self.replaced: dict[int, tuple[DTensor, nn.Parameter]] = {}  # the DTensor's id -> it and its local tensor
        self._handles: list[Any] = []

    def cut(self) -> None:
        """Puts the local tensor of every DTensor in its place. torch cannot swap the two inside one object."""
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    module._parameters[name] = self._local(parameter)

    def _local(self, parameter: DTensor) -> nn.Parameter:
        key = id(parameter)
        if key not in self.replaced:
            local = nn.Parameter(parameter.to_local().detach().clone(), requires_grad=parameter.requires_grad)
            self.replaced[key] = parameter, local
            self._specs[id(local)], self._shapes[id(local)] = self._specs.pop(key), self._shapes.pop(key)
            if key in self.cuts:
                self.cuts[id(local)] = self.cuts.pop(key)
        return self.replaced[key][1]

    def attach(self) -> None:
        """Lets the modules hold DTensors while they run."""
        for module in self.model.modules():
            places = {name: id(p) for name, p in module._parameters.items() if p is not None and id(p) in self._specs}
            if places:
                self._attach(module, places)

    def detach(self) -> None:
        """Puts the DTensors back, with the values that their parameters hold."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        given = {id(local): (tensor, local) for tensor, local in self.replaced.values()}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in given:
                    tensor, local = given[id(parameter)]
                    cut = self.cuts.get(id(local))
                    with torch.no_grad():
                        tensor.to_local().copy_(local if cut is None else cut.take(local))
                    module._parameters[name] = tensor  # type: ignore[assignment]

    def _attach(self, module: nn.Module, places: dict[str, int]) -> None:
        held: list[dict[str, Any]] = []

        def before(*_: Any) -> None:
            held.append({name: module._parameters[name] for name in places})
            for name, key in places.items():
                module._parameters[name] = self._wrap(module._parameters[name], key)  # type: ignore[arg-type,assignment]

        def after(*_: Any) -> None:
            module._parameters.update(held.pop())

        self._handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, prepend=True, always_call=True),
        ]

    def _wrap(self, local: torch.Tensor, key: int) -> DTensor:
        mesh, placements = self._specs[key]
        shape, stride = self._shapes[key]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _read_cut(name: str, tensor: DTensor, axis: Axis) -> Cut | None:
    """Which part of the whole a rank holds, by a DTensor's placement; None if it holds all of it."""
    placements = tensor.placements
    if tensor.device_mesh.size() != axis.size or len(placements) != 1:
        raise PlanError(
            f"the parameter {name!r} is a DTensor over a mesh of {tuple(tensor.device_mesh.shape)}, but the tensor "
            f"axis has {axis.size} ranks. Parallelize the model over the tensor axis alone, mesh['tensor']."
        )
    (placement,) = placements
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard):
        raise PlanError(
            f"the parameter {name!r} has the placement {placement}. Only Shard and Replicate can be trained."
        )
    length = tensor.shape[placement.dim]
    step = -(-length // axis.size)  # as torch cuts: equal pieces, the last ones shorter
    start = min(axis.rank * step, length)
    return Cut(tuple(tensor.shape), placement.dim, ((start, min(start + step, length)),))
