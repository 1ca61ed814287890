"""Which rank a launcher (torchrun, Slurm's srun through it, Ray) made this process, from its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unbounded.errors import PlanError


@dataclass(frozen=True)
class Launch:
    """RANK, WORLD_SIZE and LOCAL_RANK; a process that was started by itself is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch() -> Launch:
    """What the launcher says; raises where it contradicts itself."""
    size = _read("WORLD_SIZE", 1, least=1, most=1 << 20)
    rank = _read("RANK", 0, least=0, most=(1 << 20) - 1)
    if rank >= size:
        raise PlanError(
            f"RANK is {rank}, but WORLD_SIZE is {size}. Start ranks with torchrun, or unset both for a single process."
        )
    return Launch(rank, size, _read("LOCAL_RANK", 0, least=0, most=size - 1))


def _read(name: str, default: int, *, least: int, most: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise PlanError(
            f"{name} is {text[:80]!r}, but it must be a whole number from {least} to {most}. "
            "Start ranks with torchrun, which sets it, or unset it for a single process."
        )
    return value
