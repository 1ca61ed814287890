"""Joining the job that a launcher started.

A process group that is already there is used as it is. Without one, a process that a launcher started as one of
several makes it, so that ranks never train alone without saying so.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from unbounded.errors import PlanError
from unbounded.launcher import Launch, read_launch, read_numbers, tell_local_rank
from unbounded.ranks.axis import is_running
from unbounded.ranks.watchdog.first_meeting import TOLD_AFTER_SECONDS, RollCall, name_ranks

_JOIN = timedelta(minutes=10)
_TRY_SECONDS = 2.0  # of one connection


def is_due() -> bool:
    """Whether a launcher started this process among others and nobody has made the process group."""
    return not is_running() and read_launch(os.environ) is not None


def local_device(kind: str) -> torch.device:
    """The device of `kind` that this process uses on its machine. Makes it the current one."""
    if kind != "cuda":
        return torch.device(kind)
    index = read_numbers(os.environ).local_rank or 0
    if index >= torch.cuda.device_count():
        raise PlanError(
            f"local rank {index} has no GPU: torch sees {torch.cuda.device_count()} of them. "
            "Start as many processes per node as it has GPUs."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def spare_device() -> torch.device:
    """The device that picks the backend for a model without one: this rank's GPU, if a group must be made."""
    return local_device("cuda" if torch.cuda.is_available() else "cpu") if is_due() else torch.device("cpu")


def join(device: torch.device) -> bool:
    """All ranks must call this. Makes the process group if a launcher started several ranks and there is none.

    Returns whether it did. `device` picks the backend: NCCL for a GPU, gloo otherwise.
    """
    if is_running():
        return False
    launch = read_launch(os.environ)
    if launch is None:
        return False
    if not dist.is_available():
        raise PlanError(
            f"{launch.launcher} started {launch.size} ranks, but this torch is built without "
            "torch.distributed. Install another build."
        )
    _make_group(launch, device)
    if launch.rank == 0:
        print(
            f"unbounded: joined {launch.size} ranks started by {launch.launcher}, over {dist.get_backend()}.",
            file=sys.stderr,
        )
    return True


def _make_group(launch: Launch, device: torch.device) -> None:
    tell_local_rank(launch, os.environ)
    # Under torchrun the agent already has the store.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_store(launch)
    try:
        store: dist.Store = dist.TCPStore(
            launch.address,
            launch.port,
            launch.size,
            is_master=hosts,
            timeout=_JOIN,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise PlanError(_describe_store(launch, error)) from error
    # A prefix of their own keeps them from reading the keys of workers and groups that had this store before.
    store = dist.PrefixStore(f"unbounded-{_await_all(store, launch)}", store)
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size, device_id=bound)


def _await_store(launch: Launch) -> None:
    """Returns once somebody listens where the job's store is to be. torch would wait in C++, where neither Ctrl-C nor
    anything else ends it, without a word, and then print pages."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            return socket.create_connection((launch.address, launch.port), _TRY_SECONDS).close()
        except OSError as error:
            seconds = time.monotonic() - began
            if seconds > _JOIN.total_seconds():
                raise PlanError(_describe_store(launch, error, f" in {seconds:.0f} s")) from error
            if seconds > TOLD_AFTER_SECONDS and not is_told:
                is_told = True
                print(
                    f"unbounded: rank {launch.rank} has tried for {seconds:.0f} s to reach the job's store at "
                    f"{launch.address}:{launch.port}, which rank 0 or its launcher holds ({error}).",
                    file=sys.stderr,
                )
        time.sleep(min(1.0, 0.05 + seconds / 10))


def _describe_store(launch: Launch, error: Exception, when: str = "") -> str:
    return (
        f"rank {launch.rank} of {launch.size} could not connect to its peers at {launch.address}:{launch.port}{when}: "
        f"{error}. Check that every rank was started and that the port is free and reachable."
    )


def _await_all(store: dist.Store, launch: Launch) -> str:
    """All ranks must call this. A name for their group, once every rank has come; raises if one has not in time."""
    advice = "Check that every rank was started and calls unbounded, and look for the first error in their output."
    try:
        arrivals = RollCall(store, launch.rank, launch.size)
        while not arrivals.is_complete():
            arrivals.tell()
            if arrivals.seconds > _JOIN.total_seconds():
                raise PlanError(
                    f"rank {launch.rank} of {launch.size} waited {arrivals.seconds:.0f} s for "
                    f"{name_ranks(arrivals.absent())} to make the first call to unbounded. {advice}"
                )
            time.sleep(0.05 + launch.size / 1000)  # many ranks ask one store
        return arrivals.name
    except RuntimeError as error:
        raise PlanError(
            f"rank {launch.rank} of {launch.size} lost the job's store at {launch.address}:{launch.port}, which rank 0 "
            f"or its launcher holds, before every rank had come: {error}. {advice}"
        ) from error
