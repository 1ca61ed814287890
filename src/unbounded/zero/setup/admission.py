"""What may be sharded: everything that `shard` was given is checked before anything is touched.

Every rank checks what it was given and tells the others, and all of them go on or all of them raise: a rank that raised
alone would leave its peers waiting.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unbounded.errors import PlanError
from unbounded.launcher import read_local
from unbounded.optim.formats import DTYPES
from unbounded.planner.plan import Plan, read_plan
from unbounded.ranks import launch
from unbounded.ranks.axis import Axis
from unbounded.ranks.mesh import Axes, make_axes, world_axis
from unbounded.ranks.phases import describe_groups
from unbounded.zero.members import Member, find_members
from unbounded.zero.parameters.parameter import ManagedParameter, refuse_accumulate_hook
from unbounded.zero.step.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Admitted:
    """What `shard` was given, checked and the same on every rank. `groups` are by the parameter's id."""

    members: list[Member]
    plan: Plan
    groups: dict[int, int]
    device: torch.device
    axes: Axes


# What torch notes on a parameter that something is done to as soon as it has its gradient.
_IN_BACKWARD = {
    "_post_accumulate_grad_hooks": "a post-accumulate-grad hook",
    "_in_backward_optimizers": "an optimizer that steps in the backward",
}


def admit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: str | Plan | Mapping[str, Any],
    *,
    mesh: DeviceMesh | None,
    is_known: bool,
    has_folder: bool,
) -> Admitted:
    """All ranks must call this. Joins the job, and checks that every rank can shard the same thing.

    `has_folder` says whether the model's weights come from a folder.
    """
    launch.join(_own_device(model))
    world, error, admitted, marks, lines = world_axis(), None, None, {}, [""]
    try:
        members = check_model(model, is_known=is_known)
        read = read_plan(plan)
        groups = check_optimizer(optimizer, members)
        admitted = members, read, groups, compute_device(members)
        lines = [_describe_origin(model, has_folder=has_folder), *_describe_model(model, members)]
        marks = {
            "model": zlib.crc32("\n".join(lines).encode()),
            "plan": repr(replace(read, disk_path=None)),
            "optimizer": None
            if optimizer is None
            else describe_groups(type(optimizer).__name__, optimizer.param_groups),
            "division of parameters into groups": _mark_groups(groups, members),
            "optimizer state": _describe_states(optimizer),
            "mesh": _describe_mesh(mesh),
        }
    except Exception as caught:
        error = caught
    told = world.agree(error, marks, what="unbounded.shard()")
    assert admitted is not None
    _compare(told, world, lines)
    members, read, groups, device = admitted
    axes = make_axes(mesh, device, tensor=read.tensor, pipeline=read.pipeline, context=read.context)
    axes.limit(read.watchdog_seconds)
    return Admitted(members, _own_paths(read, world.rank), groups, device, axes)


def _own_device(model: nn.Module) -> torch.device:
    """The device that picks this rank's backend: the model's GPU, or the rank's own if the model is on none yet."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None and first.device.type == "cuda":
        return first.device
    return launch.spare_device()


def _describe_origin(model: nn.Module, *, has_folder: bool) -> str:
    """Where the first values of a model come from: ranks must take them from there together."""
    if has_folder:
        return "a model whose weights come from a folder"
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    return "a model on the meta device" if is_meta else "a model with values"


def _describe_mesh(mesh: DeviceMesh | None) -> str:
    if isinstance(mesh, DeviceMesh):
        return f"{mesh.mesh_dim_names} of the ranks {mesh.mesh.tolist()}"
    return "none" if mesh is None else type(mesh).__name__


def _describe_model(model: nn.Module, members: list[Member]) -> list[str]:
    """The parameters and buffers that must be the same on every rank, in words."""
    parameters = [
        f"parameter {', '.join(m.names)} {tuple(m.parameter.shape)} {m.parameter.dtype}, "
        f"{'trained' if m.parameter.requires_grad else 'frozen'}"
        for m in members
    ]
    return parameters + [f"buffer {name} {_describe_buffer(buffer)}" for name, buffer in model.named_buffers()]


def _describe_buffer(buffer: torch.Tensor) -> str:
    held = "" if buffer.layout is torch.strided else f" {buffer.layout} of {buffer._nnz()} values"
    return f"{tuple(buffer.shape)} {buffer.dtype}{held}"


def _mark_groups(groups: dict[int, int], members: list[Member]) -> int:
    """Which group has each parameter; their order inside a group may be another one."""
    return zlib.crc32(repr([groups.get(id(member.parameter)) for member in members]).encode())


def _describe_states(optimizer: torch.optim.Optimizer | None) -> str:
    """How far the states are that `shard` takes over: every rank takes its own, so they must have stepped alike."""
    kept = optimizer.state.values() if optimizer is not None else ()
    held = [states for states in kept if isinstance(states, dict) and states]
    steps = [states.get("step", 1) for states in held]
    num_updates = sum(int(step) for step in steps if not getattr(step, "is_meta", False))
    return f"{len(held)} parameters after {num_updates} updates in all" if num_updates else "none"


def _compare(told: list[dict[str, Any]], world: Axis, lines: list[str]) -> None:
    """All ranks must call this. Raises on every rank if one was given something different from the first."""
    for rank, marks in enumerate(told):
        for what, mark in marks.items():
            if mark != told[0][what]:
                shown = "" if isinstance(mark, int) else f": {mark} instead of {told[0][what]}"
                if what == "model":
                    shown = f": {_first_difference(world, lines, rank)}"
                raise PlanError(
                    f"rank {rank} has a different {what} from rank 0{shown}. "
                    f"Build the same {what} on every rank, in the same order."
                )


def _first_difference(world: Axis, lines: list[str], rank: int) -> str:
    """All ranks must call this. Where the model of `rank` begins to differ from the first one's."""
    told = world.objects(lines, "the comparison of every rank's model")
    pairs = itertools.zip_longest(told[rank], told[0], fillvalue="nothing")
    return next(f"{own} instead of {other}" for own, other in pairs if own != other)


def _own_paths(plan: Plan, rank: int) -> Plan:
    """The plan with this rank's numbers in its disk paths, which may differ between ranks."""
    if plan.disk_path is None:
        return plan
    local_rank, _ = read_local(os.environ)
    numbers = {"{rank}": str(rank), "{local_rank}": str(rank if local_rank is None else local_rank)}
    paths = []
    for path in plan.disk_path:
        for key, number in numbers.items():
            path = path.replace(key, number)
        paths.append(path)
    return replace(plan, disk_path=tuple(paths))


def check_model(model: nn.Module, *, is_known: bool) -> list[Member]:
    """The parameters of a model; raises if it cannot be sharded, or is already sharded (`is_known`)."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"shard was given a {type(model).__name__} as the model. Give an nn.Module.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{_called(name, 'module')} was made by torch.jit.script or torch.jit.trace, and takes no hooks. "
                "Shard a model that has the module it was made from; scripted functions may stay."
            )
    check_shapes(model)
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise PlanError(
                f"the parameter {name!r} was made inside torch.inference_mode, which leaves it without what a graph "
                "needs. Make the model outside, or under torch.no_grad."
            )
    members = find_members(model)
    managed = [member.names[0] for member in members if isinstance(member.parameter, ManagedParameter)]
    if is_known or managed:
        whose = f" (its parameter {managed[0]!r})" if managed else ""
        raise PlanError(
            f"this model is already sharded{whose}. Call shard once, and keep the model it "
            "returns; to shard it anew, call unbounded.unshard on that model first."
        )
    if not any(member.parameter.numel() for member in members):
        raise PlanError(f"the {type(model).__name__} has no parameters with elements to place. Leave it as it is.")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise PlanError(
                f"{_called(name, 'embedding')} has sparse gradients, which cannot be reduced over flat buffers. "
                "Make it with sparse=False."
            )
    for member in members:
        for mark, what in _IN_BACKWARD.items():
            if getattr(member.parameter, mark, None):
                refuse_accumulate_hook(member.names[0], what)
        _check_operations(member)
    _check_memory(model, members)
    first: dict[str, str] = {}
    for member in members:
        first.setdefault(str(member.parameter.device), member.names[0])
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise PlanError(
            f"the model's parameters are on different devices: {places}. Move the whole model to one of them first."
        )
    return members


def check_shapes(model: nn.Module) -> None:
    """Raises if parameters or buffers are made by the first forward."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise PlanError(
                f"{name!r} of a lazy module has no shape yet. Run a batch through the model first, then make the "
                "optimizer."
            )


def _called(name: str, kind: str) -> str:
    return f"the {kind} {name!r}" if name else "the model"


def _check_operations(member: Member) -> None:
    """Raises if the class of a float parameter has operations of its own: units keep plain values."""
    kind = type(member.parameter)
    is_plain = kind.__torch_function__ is nn.Parameter.__torch_function__
    is_plain = is_plain and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    if is_plain or hasattr(kind, "to_local") or not member.parameter.is_floating_point():  # a DTensor is cut by an axis
        return
    raise PlanError(
        f"the parameter {member.names[0]!r} is a {kind.__name__}, a class with operations of its own, but a sharded "
        "model computes with plain tensors. Give its module a plain Parameter and those operations, for example by "
        "torch.nn.utils.parametrize."
    )


def _check_memory(model: nn.Module, members: list[Member]) -> None:
    """Raises if anything else shares the memory of a Parameter: sharding would separate them."""
    places = [(*_extent(member.parameter), True, member.names[0]) for member in members]
    buffers = [(name, one) for name, one in model.named_buffers() if type(one) in (torch.Tensor, nn.Parameter)]
    places += [(*_extent(tensor), False, name) for name, tensor in [*buffers, *_attributes(model)]]
    ends = {True: (0, ""), False: (0, "")}  # of parameters and of others so far, with the name of the last to end
    for start, stop, is_parameter, name in sorted(places):
        for is_other_parameter, (end, other) in ends.items():
            if start < min(stop, end) and (is_parameter or is_other_parameter):
                _refuse_shared_memory(other, name, is_other_parameter and is_parameter)
        ends[is_parameter] = max(ends[is_parameter], (stop, name))


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes of modules, unless hooks make them anew in every forward (`spectral_norm`)."""
    for path, module in model.named_modules():
        for key, value in vars(module).items() if not module._forward_pre_hooks else ():
            if type(value) is torch.Tensor:
                yield f"{path}.{key}" if path else key, value


def _refuse_shared_memory(name: str, other: str, are_parameters: bool) -> None:
    if are_parameters:
        raise PlanError(
            f"the parameters {name!r} and {other!r} are two Parameters over the same memory, which sharding would "
            "untie. Tie them by giving both modules the same Parameter object."
        )
    raise PlanError(
        f"{name!r} and {other!r}, a parameter and another tensor of the model, have the same memory, which sharding "
        "would untie: the other would keep the first values. Make it a copy, or use the parameter in its place."
    )


def _extent(tensor: Any) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    if hasattr(tensor, "to_local"):  # a DTensor has no memory of its own
        tensor = tensor.to_local()
    if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
        return 0, 0
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (spread + 1) * tensor.element_size()


def check_optimizer(optimizer: torch.optim.Optimizer | None, members: list[Member]) -> dict[int, int]:
    """The group of every parameter the optimizer trains, by the parameter's id."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer is a {type(optimizer).__name__}. Give a torch.optim optimizer.")
    if isinstance(optimizer, ShardedOptimizer):
        raise PlanError("this optimizer is already sharded. Give the torch.optim optimizer it was made from.")
    names = {id(member.parameter): member.names[0] for member in members}
    groups: dict[int, int] = {}
    foreign = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in groups:
                raise PlanError(
                    f"the optimizer has the parameter {names.get(id(parameter))!r} twice. List it in one group."
                )
            if parameter.numel() == 0:
                continue
            foreign += id(parameter) not in names
            groups[id(parameter)] = index
    if foreign:
        raise PlanError(
            f"the optimizer has {foreign} parameters that the model does not. "
            "Make it from model.parameters() of this model."
        )
    missing = [m.names[0] for m in members if m.parameter.requires_grad and id(m.parameter) not in groups]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise PlanError(
            f"the optimizer does not have the trainable parameters {shown}. Give them to it, or freeze them."
        )
    return groups


def compute_device(members: list[Member]) -> torch.device:
    """Where a model with these parameters will run."""
    device = members[0].parameter.device if members else torch.device("cpu")
    if device.type == "cuda":
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    if device.type not in ("cpu", "meta"):
        raise PlanError(f"the model is on {device}, which is not supported. Use CPU, CUDA or the meta device.")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def common_precision(model: nn.Module) -> str:
    """The precision that most of a model's parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    known = [dtype for dtype in counts if dtype in names]
    return names[max(known, key=lambda dtype: counts[dtype])] if known else "fp32"
