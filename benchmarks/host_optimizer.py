"""Host AdamW in every state format against torch.optim.AdamW(fused=True), as ratios within one run.

    python benchmarks/host_optimizer.py [--parameters 100000000] [--threads N] [--repetitions 15]
    python benchmarks/host_optimizer.py --turns      # the same in random order, with CPU seconds
    python benchmarks/host_optimizer.py --rules      # other rules against torch's fused ones
    python benchmarks/host_optimizer.py --buffers    # conversions, sums, norms and checksums against torch
    python benchmarks/host_optimizer.py --drafts     # updates that write their new states elsewhere, against in place
    python benchmarks/host_optimizer.py --sums       # gradients added up in pieces, as they arrive, against one call

Exits with 1 if a ratio of the first is below what is promised. The others only show theirs: seconds, and CPU seconds,
which tell more if other programs run. Cases take turns in random order.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from unbounded.cli.bench.host_optimizer import RULE, cases, run_host
from unbounded.native import kernels
from unbounded.native.disk import crc32c
from unbounded.native.host_memory import host_buffer
from unbounded.native.kernels import Pool, Rule, UpdatePart, has_parts

REQUIRED = {"fp32": 1.0, "exact": 1.0, "compact": 1.4}
PIECE_NUMELS = (2**20, 2**23, 2**25)  # 2**23: 16 MiB in bf16, which is what arrives at a time

Cases = Mapping[str, Callable[[], object]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=15)
    mode = parser.add_mutually_exclusive_group()
    for name in MODES:
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    arguments = parser.parse_args()
    if arguments.mode is None:
        return compare_torch(arguments.parameters, arguments.threads, arguments.repetitions)
    with Pool(arguments.threads or kernels.default_pool().num_threads) as pool:
        torch.set_num_threads(pool.num_threads)
        print(f"{arguments.parameters / 1e6:.0f}M parameters, {pool.num_threads} threads, {pool.simd}")
        for title, make in MODES[arguments.mode].items():
            print(f"{title}:")
            take_turns(make(arguments.parameters, pool), arguments.repetitions)
    return 0


def compare_torch(parameters: int, threads: int | None, repetitions: int) -> int:
    rows = run_host(parameters=parameters, threads=threads, repetitions=repetitions)
    ratios = {row.name.split(",")[0]: row.ratio for row in rows[1:]}
    short = [f"{name} {ratios[name]:.2f} < {least}" for name, least in REQUIRED.items() if ratios[name] < least]
    print("below the promise: " + ", ".join(short) if short else "every ratio is reached")
    return 1 if short else 0


def torch_cases(parameters: int, pool: Pool) -> Cases:
    return {case.name: partial(case.run, 2) for case in cases(parameters, pool)}


def rule_cases(rule: Rule, make: Callable[..., torch.optim.Optimizer], parameters: int, pool: Pool) -> Cases:
    """torch's fused optimizer in fp32, and the rule in every format."""
    parameter = torch.nn.Parameter(torch.full((parameters,), 0.02))
    parameter.grad = torch.full((parameters,), 1e-3)
    optimizer = make([parameter], fused=True)
    grads = {dtype: zeros(dtype, parameters).fill_(1e-3) for dtype in (torch.float32, torch.bfloat16)}

    def ours(format: str) -> Callable[[], None]:
        dtype = torch.float32 if format == "fp32" else torch.bfloat16
        specs = kernels.state_arrays(rule.name, format, dtype, momentum=rule.momentum != 0)
        states = {name: zeros(spec.dtype, spec.numel(parameters)) for name, spec in specs.items()}
        weight = zeros(dtype, parameters).fill_(0.02)
        return lambda: kernels.update(rule, format, weight=weight, grad=grads[dtype], states=states, pool=pool)

    return {"torch": optimizer.step, **{format: ours(format) for format in ("fp32", "exact", "compact")}}


def conversion_cases(source: torch.dtype, target: torch.dtype, parameters: int, pool: Pool) -> Cases:
    x, y = zeros(source, parameters).fill_(1e-3), zeros(target, parameters)
    return {"torch": lambda: y.copy_(x), "ours": lambda: kernels.convert(x, y, pool)}


def addition_cases(source: torch.dtype, target: torch.dtype, parameters: int, pool: Pool) -> Cases:
    x, y = zeros(source, parameters).fill_(1e-3), zeros(target, parameters)
    return {"torch": lambda: y.add_(x), "ours": lambda: kernels.add(y, y, x, pool)}


def norm_cases(dtype: torch.dtype, parameters: int, pool: Pool) -> Cases:
    """Ours adds in fp64; torch in fp32, or in fp64 if asked to."""
    x = zeros(dtype, parameters).fill_(1e-3)
    return {
        "torch": lambda: torch.linalg.vector_norm(x),
        "torch in fp64": lambda: torch.linalg.vector_norm(x, dtype=torch.float64),
        "ours": lambda: kernels.sum_squares(x, pool),
    }


def checksum_cases(parameters: int, pool: Pool) -> Cases:
    """A checksum is computed by one thread: compare CPU seconds."""
    x, y = zeros(torch.float32, parameters).fill_(1e-3), zeros(torch.float32, parameters)
    return {"copy": lambda: kernels.copy(x, y, pool), "crc32c": lambda: crc32c(x)}


def draft_cases(format: str, parameters: int, pool: Pool) -> Cases:
    """An update in place and its two parts, one that leaves the old states, and one that gives new weights alone."""
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    specs = kernels.state_arrays(RULE.name, format, dtype)
    grad = zeros(torch.bfloat16, parameters).fill_(1e-3)

    def arrays() -> dict[str, torch.Tensor]:
        states = {name: zeros(spec.dtype, spec.numel(parameters)) for name, spec in specs.items()}
        return {"weight": zeros(dtype, parameters).fill_(0.02), **states}

    def update(
        to: Mapping[str, torch.Tensor],
        source: Mapping[str, torch.Tensor] | None = None,
        part: UpdatePart = UpdatePart.WHOLE,
    ) -> None:
        states = {name: to[name] for name in specs} if source is None or part is UpdatePart.WHOLE else None
        rule = replace(RULE, step=2)
        kernels.update(rule, format, weight=to["weight"], grad=grad, states=states, source=source, part=part, pool=pool)

    old, new = arrays(), arrays()
    parts = {
        "weights in place": lambda: update(old, part=UpdatePart.WEIGHTS),
        "moments in place": lambda: update(old, part=UpdatePart.MOMENTS),
    }
    return {
        "in place": lambda: update(old),
        **(parts if has_parts(RULE, format) else {}),
        "draft": lambda: update(new, old),
        "draft of weights": lambda: update(new, old, UpdatePart.WEIGHTS),
    }


def sum_cases(parameters: int, pool: Pool) -> Cases:
    """bf16 gradients added to sums in fp32, by one call and by one for each piece."""
    sums, grad = zeros(torch.float32, parameters), zeros(torch.bfloat16, parameters).fill_(1e-3)

    def add(piece_numel: int) -> None:
        for to, part in zip(sums.split(piece_numel), grad.split(piece_numel), strict=True):
            kernels.add(to, to, part, pool)

    pieces = {f"pieces of {2 * numel >> 20} MiB": lambda numel=numel: add(numel) for numel in PIECE_NUMELS}
    return {"one call": lambda: add(parameters), **pieces}


def zeros(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return host_buffer(numel * dtype.itemsize).view(dtype)


def take_turns(cases: Cases, repetitions: int) -> None:
    """Prints the median of every case, and how many times as long as the first it takes."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions + 1):  # the first touches the pages and is not counted
        for name, run in random.sample(list(cases.items()), len(cases)):
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    first, *_ = cases
    for name in cases:
        seconds, spent = median(wall[name][1:]), median(cpu[name][1:])
        ratios = seconds / median(wall[first][1:]), spent / median(cpu[first][1:])
        print(f"  {name:18} {seconds * 1e3:7.1f} ms, x {ratios[0]:.2f}; {spent * 1e3:7.1f} CPU ms, x {ratios[1]:.2f}")


HALF, FULL = torch.bfloat16, torch.float32
MODES: dict[str, dict[str, Callable[[int, Pool], Cases]]] = {
    "turns": {"AdamW": torch_cases},
    "rules": {
        "SGD with momentum": partial(
            rule_cases, Rule("sgd", lr=1e-3, momentum=0.9, step=2), partial(torch.optim.SGD, momentum=0.9)
        ),
        "Adagrad": partial(rule_cases, Rule("adagrad", lr=1e-3, step=2), torch.optim.Adagrad),
        "Adam": partial(rule_cases, Rule("adam", lr=1e-4, step=2), torch.optim.Adam),
    },
    "buffers": {
        "fp32 to bf16": partial(conversion_cases, FULL, HALF),
        "bf16 to fp32": partial(conversion_cases, HALF, FULL),
        "fp32 to fp16": partial(conversion_cases, FULL, torch.float16),
        "fp16 to fp32": partial(conversion_cases, torch.float16, FULL),
        "fp32 sums of bf16": partial(addition_cases, HALF, FULL),
        "bf16 sums of bf16": partial(addition_cases, HALF, HALF),
        "fp32 sums of fp32": partial(addition_cases, FULL, FULL),
        "norm of fp32": partial(norm_cases, FULL),
        "norm of bf16": partial(norm_cases, HALF),
        "checksum": checksum_cases,
    },
    "drafts": {format: partial(draft_cases, format) for format in ("exact", "fp32", "compact")},
    "sums": {"fp32 sums of bf16": sum_cases},
}

if __name__ == "__main__":
    raise SystemExit(main())
