"""How far the resident set grows while a model trains on the CPU, against what `optimizer.memory()` counts.

    python benchmarks/memory/resident_set.py [--width N] [--depth N] [--tier host|disk|device] [--steps N]

A stack of linear layers in fp32, one unit each, with weights, gradients and states on one tier. Batches have four rows,
so that activations are small and the engine's own time shows. Prints MiB, and the least time and CPU time of a step.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import unbounded
from unbounded.planner.sizes import format_bytes

ROWS = 4


def resident_bytes() -> int:
    """The process's anonymous memory."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def train(width: int, depth: int, tier: str, steps: int, look: Callable[[int], None]) -> list[tuple[float, float]]:
    """The time and the CPU time of each step; `look` gets what is counted on device and host."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(depth)))
    tiers = dict.fromkeys(("weights", "gradients", "optimizer"), tier)
    plan = {**tiers, "host_bytes": "4GiB", "disk_path": tempfile.gettempdir()}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    batch, times = torch.randn(ROWS, width), []
    for _ in range(steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        model(batch).square().mean().backward()
        look(sum(optimizer.memory()[name].used_bytes for name in ("device", "host")))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        times.append((time.perf_counter() - start, time.process_time() - start_cpu))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--tier", choices=("device", "host", "disk"), default="host")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train(64, 2, args.tier, 2, lambda _: None)  # what is loaded once
    counted, grown, over, first = [0], [0], threading.Event(), resident_bytes()

    def watch() -> None:
        while not over.wait(0.002):
            grown[0] = max(grown[0], resident_bytes() - first)

    watcher = threading.Thread(target=watch)
    watcher.start()
    times = train(args.width, args.depth, args.tier, args.steps, lambda seen: counted.append(seen))
    over.set()
    watcher.join()
    unit = format_bytes(4 * args.width * args.width)
    print(f"{args.depth} units of {unit} on {args.tier}: counted {format_bytes(max(counted))},", end=" ")
    print(f"grown by {format_bytes(grown[0])};", end=" ")
    print(f"a step: {min(t for t, _ in times):.3f} s, CPU {min(c for _, c in times):.3f} s")


if __name__ == "__main__":
    main()
