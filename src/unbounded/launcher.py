"""Which rank this process is, by its launcher: torchrun, Slurm's srun, mpirun, Ray, or anything that sets RANK.

The environment is read and checked only here. `ranks.launch` joins the job; code that runs before or without torch (the
command line, traces, thread pools) asks only for the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from unbounded.errors import PlanError

# The variables of each launcher: a process's number and how many there are, in the job and on this machine.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # A batch script alone has no step.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Numbers:
    """This process among its peers, and among those on its machine (None if the launcher does not say)."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


@dataclass(frozen=True)
class Launch(Numbers):
    """One of `size` processes, which meet at `address`."""

    address: str
    port: int


def read_numbers(environment: Mapping[str, str]) -> Numbers:
    """What a launcher has set, checked; a process that was started by itself is rank 0 of 1."""
    for launcher, (rank_name, size_name, *local_names) in _LAUNCHERS.items():
        is_started = size_name in environment
        if not is_started and launcher != "torchrun":  # its own names are checked one by one
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
            return Numbers(launcher, rank, size, *_read_local(environment, *local_names))
    return Numbers("", 0, 1, *_read_local(environment))


def read_local(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """This process's number on its machine and how many are there, as far as a launcher tells.

    For a process that is already in a process group: what the environment says about the job is ignored.
    """
    names = next((names for names in _LAUNCHERS.values() if names[1] in environment), _LAUNCHERS["torchrun"])
    return _read_local(environment, *names[2:])


def _read_local(
    environment: Mapping[str, str], rank_name: str = "LOCAL_RANK", size_name: str = "LOCAL_WORLD_SIZE"
) -> tuple[int | None, int | None]:
    """torchrun's own names, which a user may set by hand, and otherwise the launcher's."""
    rank_name = next((name for name in ("LOCAL_RANK", rank_name) if name in environment), "")
    size_name = next((name for name in ("LOCAL_WORLD_SIZE", size_name) if name in environment), "")
    rank = _read_number(environment, rank_name, least=0) if rank_name else None
    if size_name == "SLURM_STEP_TASKS_PER_NODE":  # such as "4(x2),3", any of which may be this machine's
        counts = [int(count) for count in re.findall(r"(?:^|,)([0-9]{1,10})", environment[size_name])]
        return rank, max(counts, default=None)
    return rank, _read_number(environment, size_name, least=1) if size_name else None


def tell_local_rank(launch: Launch, environment: MutableMapping[str, str]) -> None:
    """Sets LOCAL_RANK, where other libraries look for it, to what any launcher has set."""
    environment.setdefault("LOCAL_RANK", str(launch.local_rank or 0))


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """The numbers and where the ranks meet; None for a process that runs alone."""
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
    """Where the ranks meet. Under Slurm, nodes and job number give an address that all tasks of a step agree on."""
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
