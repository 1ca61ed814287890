"""Which rank a launcher made this process: torchrun, Slurm's srun, mpirun, Ray, or anything that sets RANK.

Read from the environment and checked, and nowhere else. `ranks.launch` joins the job; what runs before or without torch
(the command line, traces) asks for the numbers alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbounded.errors import PlanError

# What names a process among its peers, by launcher: its number, how many there are, its number on this machine.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a batch script alone has no step
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


@dataclass(frozen=True)
class Numbers:
    """This process among its peers."""

    launcher: str
    rank: int
    size: int
    local_rank: int


@dataclass(frozen=True)
class Launch(Numbers):
    """One of `size` processes, which meet at `address`."""

    address: str
    port: int


def read_numbers(environment: Mapping[str, str]) -> Numbers:
    """What a launcher has set, checked; a process that was started by itself is rank 0 of 1."""
    for launcher, (rank_name, size_name, local_name) in _LAUNCHERS.items():
        is_started = size_name in environment
        if not is_started and launcher != "torchrun":  # whose own names are checked one by one
            continue
        size = _read_number(environment, size_name, least=1) if is_started else 1
        if size > 1 and rank_name not in environment:
            raise PlanError(
                f"{size_name} is {size}, but {rank_name} is not set, so this process does not know which of them it "
                f"is. Start it with torchrun, or unset {size_name} to train on one rank."
            )
        rank = _read_number(environment, rank_name, least=0) if rank_name in environment else 0
        if rank >= size:
            raise PlanError(
                f"{rank_name} is {rank}, but {size_name} is {size if is_started else 'not set'}. Number the ranks from "
                f"0 to {size - 1}, as torchrun does."
            )
        if is_started:
            return Numbers(launcher, rank, size, _read_local_rank(environment, local_name))
    return Numbers("", 0, 1, _read_local_rank(environment))


def _read_local_rank(environment: Mapping[str, str], *names: str) -> int:
    """LOCAL_RANK, which a user may set by hand, and otherwise the launcher's own."""
    name = next((name for name in ("LOCAL_RANK", *names) if name in environment), None)
    return 0 if name is None else _read_number(environment, name, least=0)


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """The numbers and where the ranks meet; None for a process of its own."""
    numbers = read_numbers(environment)
    if numbers.size == 1:
        return None
    return Launch(**vars(numbers), **_read_address(environment, numbers.launcher, numbers.size))


def _read_number(environment: Mapping[str, str], name: str, *, least: int, most: int = 2**31) -> int:
    text = environment[name].strip()
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise PlanError(f"{name} is {environment[name]!r}, but it must be a whole number of at least {least}.")
    return int(text)


def _read_address(environment: Mapping[str, str], launcher: str, size: int) -> dict[str, Any]:
    """Where the ranks meet. Slurm's nodes and job number name a place that all tasks of a step agree on."""
    address = environment.get("MASTER_ADDR", "")
    if "MASTER_PORT" in environment:
        port = _read_number(environment, "MASTER_PORT", least=1, most=65535)
    else:
        port = 0
    if launcher == "Slurm" and "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        address = address or first_node(nodes)
        job = _read_number(environment, "SLURM_JOB_ID", least=0)
        port = port or 20000 + (job * 31 + int(environment.get("SLURM_STEP_ID", "0") or 0)) % 12000
    if not address or not port:
        missing = "MASTER_ADDR" if not address else "MASTER_PORT"
        raise PlanError(
            f"this is one of {size} processes that {launcher} started, but {missing} is not set, so they cannot meet. "
            "Set MASTER_ADDR and MASTER_PORT to the first machine and a free port of it, or start with torchrun."
        )
    return {"address": address, "port": port}


def first_node(nodes: str) -> str:
    """The first machine of a node list as Slurm writes it: "gpu[003-006,9],login1" begins with gpu003."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", nodes)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")
