"""Host AdamW in every state format against torch.optim.AdamW(fused=True), as ratios within one run.

    python benchmarks/host_optimizer.py [--parameters 100000000] [--threads N] [--repetitions 15]
    python benchmarks/host_optimizer.py --drafts     # updates that write their new states elsewhere, against in place
    python benchmarks/host_optimizer.py --sums       # gradients added up in pieces, as they arrive, against one call

Exits with 1 if a ratio of the first is below what is promised. The others only show theirs: seconds, and CPU seconds,
which tell more if other programs run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch

from unbounded.cli.bench.host_optimizer import RULE, run_host
from unbounded.native import kernels
from unbounded.native.host_memory import host_buffer
from unbounded.native.kernels import Pool

REQUIRED = {"fp32": 1.0, "exact": 1.0, "compact": 1.4}
PIECE_NUMELS = (2**20, 2**23, 2**25)  # 2**23: 16 MiB in bf16, which is what arrives at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=15)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--drafts", action="store_true")
    mode.add_argument("--sums", action="store_true")
    arguments = parser.parse_args()
    if not arguments.drafts and not arguments.sums:
        return compare_torch(arguments.parameters, arguments.threads, arguments.repetitions)
    with Pool(arguments.threads or kernels.default_pool().num_threads) as pool:
        make = draft_cases if arguments.drafts else sum_cases
        print(f"{arguments.parameters / 1e6:.0f}M parameters, {pool.num_threads} threads, {pool.simd}")
        for format in ("exact", "fp32", "compact") if arguments.drafts else ("fp32 sums of bf16",):
            print(f"{format}:")
            take_turns(make(format, arguments.parameters, pool), arguments.repetitions)
    return 0


def compare_torch(parameters: int, threads: int | None, repetitions: int) -> int:
    rows = run_host(parameters=parameters, threads=threads, repetitions=repetitions)
    ratios = {row.name.split(",")[0]: row.ratio for row in rows[1:]}
    short = [f"{name} {ratios[name]:.2f} < {least}" for name, least in REQUIRED.items() if ratios[name] < least]
    print("below the promise: " + ", ".join(short) if short else "every ratio is reached")
    return 1 if short else 0


def draft_cases(format: str, parameters: int, pool: Pool) -> dict[str, Callable[[], None]]:
    """An update in place, and one that leaves the old states as they are."""
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    specs = kernels.state_arrays(RULE.name, format, dtype)
    grad = zeros(torch.bfloat16, parameters).fill_(1e-3)

    def arrays() -> dict[str, torch.Tensor]:
        states = {name: zeros(spec.dtype, spec.numel(parameters)) for name, spec in specs.items()}
        return {"weight": zeros(dtype, parameters).fill_(0.02), **states}

    def update(to: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor] | None) -> None:
        states = {name: to[name] for name in specs}
        rule = replace(RULE, step=2)
        kernels.update(rule, format, weight=to["weight"], grad=grad, states=states, source=source, pool=pool)

    old, new = arrays(), arrays()
    return {"in place": lambda: update(old, None), "draft": lambda: update(new, old)}


def sum_cases(format: str, parameters: int, pool: Pool) -> dict[str, Callable[[], None]]:
    """bf16 gradients added to sums in fp32, by one call and by one for each piece."""
    sums, grad = zeros(torch.float32, parameters), zeros(torch.bfloat16, parameters).fill_(1e-3)

    def add(piece_numel: int) -> None:
        for to, part in zip(sums.split(piece_numel), grad.split(piece_numel), strict=True):
            kernels.accumulate(to, part, pool=pool)

    pieces = {f"pieces of {2 * numel >> 20} MiB": lambda numel=numel: add(numel) for numel in PIECE_NUMELS}
    return {"one call": lambda: add(parameters), **pieces}


def zeros(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return host_buffer(numel * dtype.itemsize).view(dtype)


def take_turns(cases: Mapping[str, Callable[[], None]], repetitions: int) -> None:
    """Prints the median of every case, and how many times as long as the first it takes."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions + 1):  # the first touches the pages and is not counted
        for name, run in cases.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    first, *_ = cases
    for name in cases:
        seconds, spent = median(wall[name][1:]), median(cpu[name][1:])
        ratios = seconds / median(wall[first][1:]), spent / median(cpu[first][1:])
        print(f"  {name:18} {seconds * 1e3:7.1f} ms, x {ratios[0]:.2f}; {spent * 1e3:7.1f} CPU ms, x {ratios[1]:.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
