"""The axes of a job: the place of each rank, the groups of each axis, and meshes that cannot be the job's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unbounded
from tests import process
from unbounded.errors import PlanError
from unbounded.ranks.mesh import lay_out, make_axes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_ranks", "asked", "sizes"),
    [
        (1, {}, (1, 1, 1, 1)),
        (8, {}, (1, 8, 1, 1)),
        (8, {"tensor": 2}, (1, 4, 1, 2)),
        (8, {"tensor": 2, "pipeline": 2}, (2, 2, 1, 2)),
        (16, {"tensor": 2, "pipeline": 2, "context": 2}, (2, 2, 2, 2)),
        (512, {"tensor": 8, "pipeline": 16}, (16, 4, 1, 8)),
    ],
)
def test_the_data_axis_takes_the_ranks_that_the_others_leave(
    num_ranks: int, asked: dict[str, int], sizes: tuple[int, ...]
) -> None:
    assert tuple(lay_out(num_ranks, **asked).values()) == sizes


def test_axes_that_do_not_multiply_to_the_job_are_refused() -> None:
    with pytest.raises(PlanError, match=r"tensor=2 x pipeline=3 needs 6 ranks .* but the job has 8"):
        lay_out(8, tensor=2, pipeline=3)


def test_one_rank_has_every_axis_and_no_group() -> None:
    axes = make_axes(None, CPU)
    for axis in (axes.world, axes.data, axes.tensor, axes.pipeline, axes.context):
        assert (axis.size, axis.rank, axis.group) == (1, 0, None)
    with pytest.raises(PlanError, match=r"tensor=2 needs 2 ranks .* but the job has 1"):
        make_axes(None, CPU, tensor=2)


def places(rank: int, world_size: int, by_user: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if by_user else None
    axes = make_axes(mesh, CPU, tensor=2)
    again = make_axes(mesh, CPU, tensor=2)
    assert again.mesh is axes.mesh  # the groups are made once
    sums = [int(axis.sum(torch.tensor([10**rank]))) for axis in (axes.world, axes.data, axes.tensor, axes.pipeline)]
    lane = axes.data.lane("beside")
    assert int(lane.sum(torch.tensor([10**rank]))) == sums[1]
    assert axes.tensor.objects(rank) == [rank - rank % 2, rank - rank % 2 + 1]
    return [axes.data.rank, axes.tensor.rank, *sums]


@pytest.mark.parametrize("by_user", [False, True])
def test_tensor_is_innermost_and_every_axis_has_its_own_group(ranks: Any, by_user: bool) -> None:
    assert ranks(4, places, by_user) == [
        [0, 0, 1111, 101, 11, 1],
        [0, 1, 1111, 1010, 11, 10],
        [1, 0, 1111, 101, 1100, 100],
        [1, 1, 1111, 1010, 1100, 1000],
    ]


def refused(rank: int, world_size: int, shape: tuple[int, ...], names: tuple[str, ...] | None) -> str:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError) as caught:
        unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 1), ("data", "tensor"), "the mesh of 2 x 1 has 2 ranks, but the job has 4"),
        ((2, 2), None, "the mesh of 2 x 2 has no names"),
        ((2, 2), ("data", "rows"), "the mesh has the axis 'rows', which is none of"),
        ((2, 2), ("dp", "data"), "the mesh has the axis 'data', twice"),
        ((2, 2), ("data", "expert"), "the mesh has an expert axis of 2 ranks, which is not supported"),
    ],
)
def test_a_mesh_that_is_not_the_jobs_is_the_same_error_on_every_rank(
    ranks: Any, shape: tuple[int, ...], names: tuple[str, ...] | None, message: str
) -> None:
    errors = ranks(4, refused, shape, names)
    assert len(set(errors)) == 1
    assert errors[0].startswith(message)


def train_on(rank: int, world_size: int, with_mesh: bool) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)) if with_mesh else None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 4), float(rank + step))).square().sum()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_a_mesh_of_the_users_trains_as_the_world_does(ranks: Any) -> None:
    assert ranks(2, train_on, True) == ranks(2, train_on, False)


def count_loops(rank: int, size: int, most: list[int] | None = None) -> int:
    """Groups of torch's in this process: each has a loop over its connections, and the loop a descriptor."""

    def count() -> int:
        return sum("eventpoll" in name for name in process.open_files())

    make_axes(None, CPU, tensor=size)
    gc.collect()
    process.eventually(lambda: most is None or count() <= most[rank])
    return count()


def test_a_job_after_the_other_leaves_no_meshes(ranks: Any) -> None:
    first = ranks(2, count_loops)  # perhaps with some that the case before is still closing
    others = [ranks(2, count_loops, first) for _ in range(3)]
    assert min(first) > 1
    assert all(count <= most for counts in others for count, most in zip(counts, first, strict=True))
