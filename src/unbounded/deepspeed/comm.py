"""`deepspeed.comm`: torch.distributed, which scripts call through DeepSpeed, and `init_distributed`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from unbounded.errors import PlanError
from unbounded.launcher import read_numbers
from unbounded.ranks.launch import join, local_device


def init_distributed(dist_backend: str | None = None, *, world_size: int = -1, **unused: Any) -> None:
    """All ranks must call this. Makes the process group of the ranks that a launcher started, or of this one alone."""
    is_gpu = torch.cuda.is_available() and dist_backend != "gloo"
    join(local_device("cuda") if is_gpu else torch.device("cpu"))
    if world_size not in (-1, get_world_size()):
        raise PlanError(
            f"init_distributed was given world_size={world_size}, but this process is one of {get_world_size()}. "
            "Start the ranks with torchrun."
        )
    if dist.is_available() and not is_initialized():  # scripts ask torch.distributed for their rank even if alone
        dist.init_process_group("nccl" if is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return read_numbers(os.environ).local_rank or 0


def barrier(group: Any = None, **unused: Any) -> None:
    if is_initialized():
        dist.barrier(group)


def __getattr__(name: str) -> Any:
    """The collectives are torch's own."""
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
