"""The budgets of this rank: what the plan says, otherwise its share of what is free, and what buffers take of them.

Measuring is here; deciding is in `planner.solve`, from what this returns.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace

import torch

from unbounded.launcher import read_local
from unbounded.native.disk.bindings import ALIGNMENT
from unbounded.native.host_memory import available_bytes
from unbounded.planner.machine import MachineRates, saved_machine
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.unit_bytes import Budget
from unbounded.tiers.driver import count_device, page_table_bytes
from unbounded.tiers.staging import size_staging

# The share of a device's budget kept for activations, and the most.
ACTIVATION_PART, ACTIVATION_BYTES = 0.5, 24 * 2**30
# The share of a host's budget kept for activations, if the plan puts any there.
HOST_ACTIVATION_PART = 0.25
# The share of the host's free memory that is used unless the plan says more.
FREE_PART = 0.9
# The most elements of one piece of an update: large enough for full disk and PCIe bandwidth, small enough to keep
# several in flight. The least: a piece starts on a page of the disk in every array, the scales of blocks included.
PIECE_NUMEL, LEAST_PIECE = 2**22, 2**17
# Pieces being read ahead of the one that is updated, and pieces already updated that are still being written. Four of
# 16 MiB keep a disk busier than two of 32: by 0, 4 and 11 % in three runs in turns.
DEPTH, LEAST_DEPTH = 4, 2
BOUNCE_BUFFERS = 4
# Host memory for the checksum of one page of the disk tier.
SUM_BYTES = 4


@dataclass(frozen=True)
class LeasedBuffers:
    """The leased buffers of all lanes, and how they are used.

    Updates have `depth` pieces of `piece_numel` fp32 values in flight in each direction, with a buffer for each of
    `num_arrays`. The rest goes through buffers twice as large, one at a time. `staging_bytes` are for checkpoints,
    which are sized separately.
    """

    num_arrays: int
    piece_numel: int
    depth: int
    staging_bytes: int = 0

    @property
    def update_bytes(self) -> int:
        return self.piece_numel * 4

    @property
    def num_update(self) -> int:
        return 2 * self.depth * self.num_arrays

    @property
    def bounce_bytes(self) -> int:
        return 2 * self.update_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_update * self.update_bytes + BOUNCE_BUFFERS * self.bounce_bytes + self.staging_bytes


def measure(plan: Plan, device: torch.device, num_sharing: int) -> tuple[int, int, int]:
    """Device, host and disk bytes for one of `num_sharing` ranks on this machine."""
    free = int(available_bytes() * FREE_PART) // num_sharing
    if device.type == "cuda":
        free_there = torch.cuda.mem_get_info(device)[0]
        on_device = free_there if plan.device_bytes is None else plan.device_bytes - outside_bytes(device)
    else:
        on_device = plan.device_bytes if plan.device_bytes is not None else free * 2 // 3
        free -= min(on_device, free)
    host = plan.host_bytes if plan.host_bytes is not None else free
    if device.type == "cuda" and plan.host_bytes is not None:
        host -= page_table_bytes(host)
    disk = plan.disk_bytes if plan.disk_bytes is not None else _free_disk(plan.disk_path) // num_sharing
    return on_device, host, disk


def outside_bytes(device: torch.device) -> int:
    """The part of a device's budget outside the allocator, including what kernels will still take."""
    count = count_device(device)
    return count.context_bytes() + count.coming_bytes()


def size_buffers(host: int, num_arrays: int) -> LeasedBuffers:
    """Buffers that take at most a quarter of the host's budget, unless that is too little."""
    count, staging_bytes = size_staging(host)
    buffers = LeasedBuffers(num_arrays, PIECE_NUMEL, DEPTH, count * staging_bytes)
    while buffers.piece_numel > LEAST_PIECE and buffers.num_bytes > host // 4:
        buffers = replace(buffers, piece_numel=buffers.piece_numel // 2)
    return replace(buffers, depth=LEAST_DEPTH) if buffers.num_bytes > host // 4 else buffers


def set_aside(
    sizes: tuple[int, int, int],
    plan: Plan,
    device: torch.device,
    *,
    ring: int,
    buffers: LeasedBuffers,
    wholes: int = 0,
    may_store: int = 0,
) -> Budget:
    """The budget without what activations, gathered units (`ring`), updates of `wholes` and buffers need.

    The host keeps the checksums of states that may go to disk, at most `may_store` bytes.
    """
    on_device, host, disk = sizes
    if device.type == "cuda":
        activations = min(int(on_device * ACTIVATION_PART), ACTIVATION_BYTES)
    else:  # with an explicit budget, "device" memory on a CPU is what the states may take
        activations = 0 if plan.device_bytes is not None else on_device // 4
    gathered = (ring if plan.weights != "device" else 0) + wholes
    ring += wholes
    reserve = min(activations + gathered, on_device * 3 // 4)
    offloaded = int(host * HOST_ACTIVATION_PART) if plan.offloads_activations else 0
    sums = SUM_BYTES * -(-min(may_store, disk) // ALIGNMENT) if plan.disk_checksums else 0
    buffered = min(buffers.num_bytes + sums, host)
    # If states fit nowhere otherwise, activations get half of that, then an eighth, then nothing of the host.
    half = min(reserve, ring + reserve // 2)
    least = min(half, ring + half // 4)
    tighter = ((half, buffered + offloaded), (least, buffered + offloaded), (least, buffered))
    return Budget(on_device, host, disk, reserve, buffered + offloaded, tighter)


def this_machine(plan: Plan, device: torch.device, num_ranks: int) -> MachineRates:
    """The machine as measured and saved here, otherwise typical rates; with the ranks and threads of this job."""
    machine = saved_machine() or UNMEASURED
    if machine.is_cpu != (device.type != "cuda"):
        machine = UNMEASURED
    local = local_size(num_ranks)
    disk = {
        name: getattr(machine, name) or getattr(UNMEASURED, name) for name in ("disk_read", "disk_write", "disk_both")
    }
    return replace(
        machine,
        devices=local,
        nodes=max(1, num_ranks // local),
        host_threads=host_threads(plan, num_ranks) * local,
        network_bandwidth=machine.network_bandwidth or UNMEASURED.network_bandwidth,
        is_cpu=device.type != "cuda",
        **disk,
    )


def host_threads(plan: Plan, num_ranks: int) -> int:
    """How many threads this rank's updates have."""
    return plan.host_threads or max(1, (os.cpu_count() or 1) // local_size(num_ranks))


def local_size(world_size: int) -> int:
    """How many ranks share this machine."""
    _, num_local = read_local(os.environ)
    return min(world_size, num_local or world_size)


def _free_disk(paths: tuple[str, ...] | None) -> int:
    """What a store over these folders may take: the same on each, and some may share a filesystem."""
    folders = paths or (tempfile.gettempdir(),)
    try:
        filesystems = [os.stat(folder).st_dev for folder in folders]
        rows = zip(folders, filesystems, strict=True)
        shares = [shutil.disk_usage(folder).free * 0.95 / filesystems.count(own) for folder, own in rows]
    except OSError:
        return 2**62  # a path that cannot be read is reported by the store, with its reason
    return len(folders) * int(min(shares))
