"""The axes of a job: every rank has one place on each of them, as a `DeviceMesh` lays them out.

    pipeline   which part of the layers     outermost: neighbours exchange activations only
    data       which part of the batch      weights, gradients and optimizer states are partitioned over it
    context    which part of a sequence
    tensor     which part of every layer    innermost: its ranks are neighbours on one machine

An axis nobody asked for has size 1 and no process group. The arithmetic is pure (`lay_out`), so a mesh that does not
fit the job gives the same error on every rank before any of them communicates.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unbounded.errors import PlanError
from unbounded.ranks.axis import Axis, is_running
from unbounded.ranks.watchdog.watch import watch_job

ORDER = ("pipeline", "data", "context", "tensor")
"""The axes, from outermost to innermost."""

_SHORT = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_KNOWN = (*ORDER, "expert")

# The meshes made here, so that every model of a job runs on the same groups; and the job's group, which a mesh holds.
# Meshes of a job that has ended are dropped when the next job makes its first mesh.
_made: dict[tuple[int, ...], DeviceMesh] = {}
_made_in: weakref.ref[dist.ProcessGroup] | None = None


@dataclass(frozen=True)
class Axes:
    """A rank's axes. `world` is all ranks, for what everyone must agree on."""

    world: Axis
    data: Axis
    tensor: Axis
    pipeline: Axis
    context: Axis
    mesh: DeviceMesh | None = None

    def limit(self, seconds: float) -> None:
        """How long a rank may be waited for on any of them."""
        for axis in (self.world, self.data, self.tensor, self.pipeline, self.context):
            axis.limit = seconds
        if self.world.watch is not None:
            self.world.watch.quicken(seconds)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis that cuts something."""
        return {name: getattr(self, name).size for name in ORDER}

    @property
    def places(self) -> list[list[int]]:
        """Where every rank of the job is on each axis, in `ORDER`."""
        places = [[0, rank, 0, 0] for rank in range(self.world.size)]
        if self.mesh is not None:
            dims = {axis: dim for dim, axis in enumerate(read_mesh(self.mesh, self.world.size))}
            for rank in range(self.world.size):
                found = (self.mesh.mesh == rank).nonzero()[0].tolist()
                places[rank] = [found[dims[axis]] if axis in dims else 0 for axis in ORDER]
        return places

    @property
    def model(self) -> tuple[Axis, ...]:
        """The axes over which one copy of the model is cut: a sum over the whole model goes over these too."""
        return self.tensor, self.pipeline


def world_axis() -> Axis:
    """All ranks must call this. All ranks of the job, or only this one if there is no process group."""
    return Axis("world", dist.group.WORLD, watch_job()) if is_running() else Axis("world")


def lay_out(num_ranks: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1) -> dict[str, int]:
    """The size of every axis, from the outermost in; the data axis takes what the others leave."""
    copy = tensor * pipeline * context
    if num_ranks % copy:
        asked = {"tensor": tensor, "pipeline": pipeline, "context": context}
        shown = " x ".join(f"{name}={size}" for name, size in asked.items() if size > 1)
        raise PlanError(
            f"{shown} needs {copy} ranks for each copy of the model, but the job has {num_ranks}, which is not a "
            f"multiple. Start a multiple of {copy} ranks, or choose axes that divide {num_ranks}."
        )
    return {"pipeline": pipeline, "data": num_ranks // copy, "context": context, "tensor": tensor}


def read_mesh(mesh: DeviceMesh, num_ranks: int) -> dict[str, str]:
    """Our name -> the mesh's name, for every axis of a user's mesh; raises if it cannot be this job's."""
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}. Give a torch.distributed.DeviceMesh.")
    shape = tuple(mesh.mesh.shape)
    if math.prod(shape) != num_ranks:
        raise PlanError(
            f"the mesh of {' x '.join(map(str, shape))} has {math.prod(shape)} ranks, but the job has {num_ranks}. "
            "Make a mesh over all ranks of the job."
        )
    given = mesh.mesh_dim_names or (("data",) if len(shape) == 1 else ())
    if len(given) != len(shape):
        raise PlanError(
            f"the mesh of {' x '.join(map(str, shape))} has no names. Name its axes with mesh_dim_names: "
            f"{', '.join(_KNOWN)}."
        )
    names: dict[str, str] = {}
    for name in given:
        known = _SHORT.get(name, name)
        if known not in _KNOWN or known in names:
            fault = "twice" if known in names else f"which is none of {', '.join(_KNOWN)}"
            raise PlanError(
                f"the mesh has the axis {name!r}, {fault}. Give each axis of the mesh one of these names, each once."
            )
        names[known] = name
    return names


def make_axes(
    mesh: DeviceMesh | None, device: torch.device, *, tensor: int = 1, pipeline: int = 1, context: int = 1
) -> Axes:
    """All ranks must call this, with equal sizes. The axes of `mesh`, or of one made for the sizes."""
    world = world_axis()
    asked = {"tensor": tensor, "pipeline": pipeline, "context": context}
    if mesh is None:
        sizes = lay_out(world.size, **asked)
        if sizes["data"] == world.size:
            return _axes(world, {"data": world.group}, None)
        mesh = _make_mesh(sizes, device)
        return _axes(world, {name: mesh.get_group(name) for name, size in sizes.items() if size > 1}, mesh)
    names = read_mesh(mesh, world.size)
    found = {name: mesh.size(position) for position, name in enumerate(names)}
    _check_sizes(found, asked)
    groups = {name: mesh.get_group(given) for name, given in names.items() if found[name] > 1}
    return _axes(world, groups, mesh)


def _check_sizes(found: Mapping[str, int], asked: Mapping[str, int]) -> None:
    for name, size in asked.items():
        if size > 1 and found.get(name, 1) != size:
            raise PlanError(
                f"the plan has {name}={size}, but the mesh's {name} axis has {found.get(name, 1)} ranks. "
                "Leave it out of the plan, or make the mesh to match."
            )
    if found.get("expert", 1) > 1:
        raise PlanError(
            f"the mesh has an expert axis of {found['expert']} ranks, which is not supported. Make a mesh without it."
        )


def _axes(world: Axis, groups: Mapping[str, dist.ProcessGroup | None], mesh: DeviceMesh | None) -> Axes:
    own = {name: Axis(name, groups.get(name), world.watch) for name in ORDER}
    return Axes(world=world, mesh=mesh, **own)


def _make_mesh(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """Makes a mesh, tensor innermost. It includes axes of one rank, so every mesh made here has the same names."""
    global _made_in
    world = dist.group.WORLD
    assert world is not None
    if _made_in is None or _made_in() is not world:
        _made.clear()
        _made_in = weakref.ref(world)
    shape = tuple(sizes[name] for name in ORDER)
    if shape not in _made:
        _made[shape] = init_device_mesh(device.type, shape, mesh_dim_names=ORDER)
    return _made[shape]
