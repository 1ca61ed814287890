"""Joining the job that a launcher started: torchrun, Slurm's srun, mpirun, Ray, or anything that sets RANK.

A process group that is already there is used as it is. Without one, a process that a launcher started as one of
several makes it, so that ranks never train alone without saying so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from unbounded.errors import PlanError
from unbounded.ranks.axis import is_running

_JOIN = timedelta(minutes=10)
# What names a process among its peers, by launcher: its number, how many there are, its number on this machine.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a batch script alone has no step
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


@dataclass(frozen=True)
class Launch:
    """What the environment says about this process: one of `size` that meet at `address`."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """What a launcher has set, checked; None for a process of its own."""
    for launcher, (rank_name, size_name, local_name) in _LAUNCHERS.items():
        if size_name not in environment:
            continue
        size = _read_number(environment, size_name, least=1)
        if size == 1:
            return None
        if rank_name not in environment:
            raise PlanError(
                f"{size_name} is {size}, but {rank_name} is not set, so this process does not know which of them it "
                f"is. Start it with torchrun, or unset {size_name} to train on one rank."
            )
        rank = _read_number(environment, rank_name, least=0)
        if rank >= size:
            raise PlanError(f"{rank_name} is {rank}, but {size_name} is {size}. Number the ranks from 0 to {size - 1}.")
        local = _read_number(environment, local_name, least=0) if local_name in environment else 0
        address, port = _read_address(environment, launcher, size)
        return Launch(launcher, rank, size, local, address, port)
    return None


def _read_number(environment: Mapping[str, str], name: str, *, least: int, most: int = 2**31) -> int:
    text = environment[name].strip()
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise PlanError(f"{name} is {environment[name]!r}, but it must be a whole number of at least {least}.")
    return int(text)


def _read_address(environment: Mapping[str, str], launcher: str, size: int) -> tuple[str, int]:
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
    return address, port


def first_node(nodes: str) -> str:
    """The first machine of a node list as Slurm writes it: "gpu[003-006,9],login1" begins with gpu003."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", nodes)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")


def is_due() -> bool:
    """Whether a launcher started this process among others and nobody has made the process group."""
    return not is_running() and read_launch(os.environ) is not None


def local_device(kind: str) -> torch.device:
    """The device of `kind` that this process takes among those on its machine, made the current one."""
    if kind != "cuda":
        return torch.device(kind)
    launch = read_launch(os.environ)
    index = int(os.environ.get("LOCAL_RANK", "0" if launch is None else str(launch.local_rank)))
    if index >= torch.cuda.device_count():
        raise PlanError(
            f"local rank {index} has no GPU: torch sees {torch.cuda.device_count()} of them. "
            "Start as many processes a node as it has GPUs."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(device: torch.device) -> bool:
    """All ranks must call this. Makes the process group where a launcher started several ranks and nobody has made it.

    Says whether it did. `device` picks the backend: NCCL for a GPU, gloo otherwise.
    """
    if is_running():
        return False
    launch = read_launch(os.environ)
    if launch is None:
        return False
    if not dist.is_available():
        raise PlanError(f"{launch.launcher} started {launch.size} ranks, but this torch has no torch.distributed.")
    _make_group(launch, device)
    if launch.rank == 0:
        print(
            f"unbounded: joined {launch.size} ranks that {launch.launcher} started, over {dist.get_backend()}.",
            file=sys.stderr,
        )
    return True


def _make_group(launch: Launch, device: torch.device) -> None:
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    # With the agent of torchrun the store is there already, on the agent.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: dist.Store = dist.TCPStore(
            launch.address, launch.port, launch.size, is_master=hosts, timeout=_JOIN, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        raise PlanError(
            f"rank {launch.rank} of {launch.size} could not meet its peers at {launch.address}:{launch.port}: {error}. "
            "Check that every rank was started and that the port is free and reachable."
        ) from error
    # Restarted workers share the store with those before them: a prefix keeps them from reading stale keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"unbounded-attempt-{attempt}", store)
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size, device_id=bound)
