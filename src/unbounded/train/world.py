"""The ranks of the job: who this one is, its device, and the few small collectives that the loop needs.

Under torchrun (or any launcher that `launcher` knows) the process group is made here; one that is there already is
used as it is. A single process needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unbounded.errors import InputError
from unbounded.ranks.axis import Axis, is_running
from unbounded.ranks.launch import join, local_device
from unbounded.ranks.mesh import Axes, make_axes


@dataclass(frozen=True)
class World:
    """This rank among its peers; `owns_group` says that the process group was made here."""

    axes: Axes
    device: torch.device
    owns_group: bool = False

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return self.axes.world.size

    @property
    def data(self) -> Axis:
        """The ranks that divide the batch."""
        return self.axes.data

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.axes.world.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """All ranks must call this. Sums over the ranks that divide the batch, in double precision."""
        return self._sum(values, self.data)

    def sum_all(self, values: Sequence[float]) -> list[float]:
        """All ranks must call this. Sums over all ranks of the job, in double precision."""
        return self._sum(values, self.axes.world)

    def _sum(self, values: Sequence[float], axis: Axis) -> list[float]:
        if axis.size == 1:
            return list(values)
        device = self.device if dist.get_backend(axis.group) == "nccl" else torch.device("cpu")
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        return [float(value) for value in axis.sum(tensor).tolist()]

    def collect(self, value: Any) -> list[Any]:
        """All ranks must call this. Gives every rank the values of all ranks."""
        return self.axes.world.objects(value)

    def device_bytes(self) -> int:
        """All ranks must call this. The memory of the smallest GPU; 0 without one."""
        if self.device.type != "cuda":
            return 0
        return min(self.collect(torch.cuda.get_device_properties(self.device).total_memory))

    def barrier(self) -> None:
        """All ranks must call this. Waits until every rank has come this far."""
        self.collect(None)

    def close(self) -> None:
        """End the process group if it was made here."""
        if self.owns_group and is_running():
            dist.destroy_process_group()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with `count` CPU threads. Its sums are split by threads, so rounding depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def join_world(device: str | None = None, *, tensor: int = 1, pipeline: int = 1, context: int = 1) -> World:
    """All ranks must call this. The world of this job, on `device` (None: a GPU if there is one)."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda was given, but torch sees no CUDA device here. Use --device cpu.")
    place = local_device(kind)
    made = join(place)
    return World(make_axes(None, place, tensor=tensor, pipeline=pipeline, context=context), place, owns_group=made)
