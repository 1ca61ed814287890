"""The disk engine against the best raw O_DIRECT loop of the same run, and what the disk tier's checksums cost a step.

    python benchmarks/disk/disk_engine.py [--path FOLDER] [--size MIB] [--repetitions N]  # each figure moves 30 x SIZE
    python benchmarks/disk/disk_engine.py --checksums [--size MIB]                        # what checksums cost, alone

The goals are at least 0.95 x the loop on its best number of threads for transfers of 16 MiB and more, and 0.9 x for
reading and writing at once. The engine starts without knowing the disk, and learns about it in the run. With checksums,
a step with everything on disk should take at most 1.02 x as long as without: two models, one with and one without, take
turns, and the median ratio of neighbours counts. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import unbounded
from unbounded.cli.bench.disk_engine import Result, disk, show

WANTED = {"read": 0.95, "write": 0.95, "read and write": 0.9}
TRANSFERS = tuple(size << 20 for size in (16, 64, 256))
CHECKSUMS_AT_MOST = 1.02
WIDTH = 2048  # a unit of 4 Mi parameters: 64 MiB of weights, gradients and states in fp32


def is_reached(result: Result) -> bool:
    return result.ratio >= WANTED[result.what]


def training_step(path: str, size_bytes: int, *, checksums: bool) -> Callable[[], float]:
    """A model of `size_bytes` in total, everything on disk; returns a function that trains a step and times it."""
    num_layers = max(2, size_bytes // (16 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    tiers = dict.fromkeys(("weights", "gradients", "optimizer"), "disk")
    plan = {**tiers, "disk_path": path, "disk_checksums": checksums}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan)
    inputs = torch.randn(1, WIDTH)

    def step() -> float:
        start = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.wait()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def checksum_ratio(path: str, size_bytes: int, repetitions: int) -> float:
    """The time of a step with checksums divided by that of one without."""
    print(f"steps of {size_bytes >> 20} MiB of states, all on disk, with checksums and without", flush=True)
    checked, plain = (training_step(path, size_bytes, checksums=on) for on in (True, False))
    for step in (checked, plain):
        step()
    ratios = []
    for turn in range(repetitions):
        times = [step() for step in ((checked, plain) if turn % 2 else (plain, checked))]
        ratios.append(times[0] / times[1] if turn % 2 else times[1] / times[0])
        print(f"  {max(times):.2f} s and {min(times):.2f} s: {ratios[-1]:.3f}", flush=True)
    return statistics.median(ratios)


def tell(result: Result) -> None:
    print(
        f"  {result.what}, {result.transfer_bytes >> 20} MiB: {result.ours:.2f} GB/s, {result.ratio:.2f} x", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="a folder on the disk to measure")
    parser.add_argument("--size", type=int, default=2048, metavar="MIB", help="MiB read and written each time")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--checksums", action="store_true", help="measure only what checksums cost")
    args = parser.parse_args()
    results: list[Result] = []
    if not args.checksums:
        print("the engine and the raw loop take turns", flush=True)
        sizes = {"size_bytes": args.size << 20, "transfers": TRANSFERS, "repetitions": args.repetitions}
        results = disk(args.path, **sizes, tell=tell)
        show(results, "disk engine")
    missed = [
        f"{result.what}, {result.transfer_bytes >> 20} MiB: {result.ratio:.2f} < {WANTED[result.what]}"
        for result in results
        if not is_reached(result)
    ]
    ratio = checksum_ratio(args.path, args.size << 20, 2 * args.repetitions + 1)
    print(f"a step on disk with checksums takes {ratio:.3f} x the time of one without")
    if ratio > CHECKSUMS_AT_MOST:
        missed.append(f"checksums: {ratio:.3f} > {CHECKSUMS_AT_MOST}")
    print("\n".join(missed) or "every ratio is reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
