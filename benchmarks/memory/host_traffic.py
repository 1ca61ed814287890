"""What the host's memory gives to its optimizer and to copies from and to a GPU, alone and at the same time.

    python benchmarks/memory/host_traffic.py                       # 512M parameters, all cores
    python benchmarks/memory/host_traffic.py --threads 8 --seconds 3

Each line is a second or two of everything it names at once, in GB/s of host memory.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable

import torch

from unbounded.native import kernels
from unbounded.native.kernels import Pool, Rule
from unbounded.planner.step.streaming import UPDATED
from unbounded.tiers.arena import HostArena

COPY_BYTES, NUM_COPIES = 2**29, 4  # more than caches hold
TOGETHER = (
    ("update",),
    ("up",),
    ("down",),
    ("up", "down"),
    ("update", "up"),
    ("update", "down"),
    ("update", "up", "down"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=2**29)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to copy from and to.")
    arena = HostArena(pin=True, num_threads=options.threads)
    with Pool(options.threads) as pool:
        works = {
            "update": update(arena, options.parameters, pool),
            "up": copies(arena, True),
            "down": copies(arena, False),
        }
        for names in TOGETHER:
            rates = measure({name: works[name] for name in names}, options.seconds)
            shown = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
            print(f"{shown:40} together {sum(rates.values()) / 1e9:.1f} GB/s", flush=True)


def update(arena: HostArena, parameters: int, pool: Pool) -> Callable[[], int]:
    """AdamW with exact states; returns the bytes that one call reads and writes."""
    weight = arena.allocate(torch.bfloat16, parameters).fill_(0.01)
    grad = arena.allocate(torch.bfloat16, parameters).fill_(0.001)
    specs = kernels.state_arrays("adamw", "exact", torch.bfloat16)
    states = {name: arena.allocate(spec.dtype, spec.numel(parameters)).zero_() for name, spec in specs.items()}
    rule = Rule("adamw", lr=1e-4, weight_decay=0.01)

    def run() -> int:
        kernels.update(rule, "exact", weight=weight, grad=grad, states=states, pool=pool)
        return UPDATED * parameters

    return run


def copies(arena: HostArena, is_up: bool) -> Callable[[], int]:
    """Copies to the GPU or from it, on a stream of its own."""
    hosts = arena.allocate(torch.uint8, NUM_COPIES * COPY_BYTES).zero_().split(COPY_BYTES)
    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()

    def run() -> int:
        with torch.cuda.stream(stream):
            for host in hosts:
                (on_device.copy_ if is_up else host.copy_)(host if is_up else on_device, non_blocking=True)
        stream.synchronize()
        return NUM_COPIES * COPY_BYTES

    return run


def measure(works: dict[str, Callable[[], int]], seconds: float) -> dict[str, float]:
    """Bytes per second of each, all running at once."""
    is_over, rates = threading.Event(), dict.fromkeys(works, 0.0)

    def repeat(name: str) -> None:
        start, moved = time.perf_counter(), 0
        while not is_over.is_set():
            moved += works[name]()
        rates[name] = moved / (time.perf_counter() - start)

    threads = [threading.Thread(target=repeat, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    is_over.set()
    for thread in threads:
        thread.join()
    return rates


if __name__ == "__main__":
    main()
