"""The ranks of the job: who this one is, its device, and the few small collectives that the loop needs.

Under torchrun (or any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR) the process group is made here; one that is
there already is used as it is. A single process has none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unbounded.train.errors import InputError


@dataclass(frozen=True)
class World:
    """This rank among its peers; `owns_group` says that the process group was made here."""

    rank: int
    size: int
    device: torch.device
    owns_group: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """All ranks must call this: the sums over ranks, in double precision, the same on each."""
        if self.size == 1:
            return list(values)
        device = self.device if dist.get_backend() == "nccl" else torch.device("cpu")
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def collect(self, value: Any) -> list[Any]:
        """All ranks must call this: the value of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """All ranks must call this: wait until every rank has come this far."""
        self.sum([0.0])

    def close(self) -> None:
        """End the process group if it was made here."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def join_world(device: str | None = None) -> World:
    """All ranks must call this: the world of this job, on `device` ("cpu", "cuda", or what there is)."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda was given, but torch sees no CUDA device here. Use --device cpu.")
    place = _device(kind)
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), place)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1, place)
    _make_group(kind, place)
    return World(dist.get_rank(), dist.get_world_size(), place, owns_group=True)


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise InputError(
            f"local rank {index} has no GPU: torch sees {torch.cuda.device_count()} of them. "
            "Start as many processes a node as it has GPUs."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _make_group(kind: str, device: torch.device) -> None:
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))
    # Restarted workers share the store with those before them: a prefix keeps them from reading stale keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"unbounded-attempt-{attempt}", store)
    backend, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound)
