"""The host's addition of gradients, measured through the engine's own array: stretches that arrive are added up.

On a GPU the weights of the next units go the other way meanwhile, as in a backward, one byte for each of the gradient.
"""

from __future__ import annotations

import os

import torch

from unbounded.machine.timing import least_seconds
from unbounded.native.kernels import Pool
from unbounded.tiers.arena import HostArena
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.budget import BOUNCE_BUFFERS, DEPTH, PIECE_NUMEL, LeasedBuffers
from unbounded.tiers.pool import BufferPool
from unbounded.zero.gradients.gradient_array import GradientArray

ADDED = 10  # bytes of host memory per element: the sum in fp32 read and written, what arrives in bf16 read


def measure_additions(device: torch.device) -> dict[str, float]:
    """`host_add_rate`, in bytes of memory traffic per second of all threads together."""
    is_gpu = device.type == "cuda"
    numel = 2**27 if is_gpu else 2**24  # sums that no cache holds
    threads = os.cpu_count() or 1
    arena = HostArena(pin=is_gpu, num_threads=threads)
    buffers = LeasedBuffers(0, PIECE_NUMEL, DEPTH)
    bounce = BufferPool(arena, buffers.bounce_bytes, BOUNCE_BUFFERS)
    gradient = GradientArray("host", numel, wire=torch.bfloat16, sum_dtype=torch.float32)

    def allocate(dtype: torch.dtype, numel: int, *, unplanned_bytes: int = 0) -> Array:
        return MemoryArray(arena.allocate(dtype, numel), "host", arena.release)

    pool = Pool(threads)
    gradient.connect(allocate, bounce, pool)
    part = torch.ones(numel, dtype=torch.bfloat16, device=device)
    gradient.store(part)
    weights = arena.allocate(torch.bfloat16, numel) if is_gpu else None
    stream = torch.cuda.Stream(device) if is_gpu else None
    gathered = torch.empty_like(part)

    def add() -> None:
        if weights is not None:
            with torch.cuda.stream(stream):
                gathered.copy_(weights, non_blocking=True)
        gradient.accumulate(part)

    seconds = least_seconds(add, device)  # the first run widens the sum
    pool.close()
    arena.close()
    return {"host_add_rate": ADDED * numel / seconds}
