"""`unbounded bench host`: the host optimizer beside torch's fused AdamW, measured in one run.

Cases take turns, repetition by repetition, so that other load on the machine falls on all of them alike; the ratio
is of median times. torch and the fp32 case work on the same tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unbounded.native import kernels
from unbounded.native.kernels import Pool, Rule

RULE = Rule("adamw", lr=1e-4, weight_decay=0.01)
REFERENCE = "torch AdamW(fused=True)"


@dataclass(frozen=True)
class Case:
    """One optimizer step to time; `bytes_moved` is the traffic of one parameter, read and written."""

    name: str
    bytes_moved: float
    run: Callable[[int], None]


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    bytes_moved: float
    ratio: float  # reference time / this time


def run_host(
    *, parameters: int = 100_000_000, threads: int | None = None, repetitions: int = 7, console: Console | None = None
) -> list[Row]:
    """Measures AdamW in every state format against torch and prints a table; returns its rows."""
    threads = threads or kernels.default_pool().num_threads
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Pool(threads) as pool:
            rows = _measure(_cases(parameters, pool), repetitions)
            (console or Console()).print(_table(rows, parameters, pool))
    finally:
        torch.set_num_threads(before)
    return rows


def _cases(parameters: int, pool: Pool) -> list[Case]:
    weight, grad = torch.randn(parameters) * 0.02, torch.randn(parameters) * 1e-3
    states = _states("fp32", torch.float32, parameters)
    grad_half = grad.to(torch.bfloat16)

    def ours(format: str, weight: Tensor, grad: Tensor, states: dict[str, Tensor]) -> Callable[[int], None]:
        def run(step: int) -> None:
            rule = Rule(RULE.name, lr=RULE.lr, weight_decay=RULE.weight_decay, step=step)
            kernels.update(rule, format, weight=weight, grad=grad, states=states, pool=pool)

        return run

    exact, compact = (_states(format, torch.bfloat16, parameters) for format in ("exact", "compact"))
    exact_weight, compact_weight = weight.to(torch.bfloat16), weight.to(torch.bfloat16)
    return [
        Case(REFERENCE, 28, _torch_step(weight, grad, states)),
        Case("fp32", 28, ours("fp32", weight, grad, states)),
        Case("exact, bf16 gradient", 26, ours("exact", exact_weight, grad_half, exact)),
        Case("compact, bf16 gradient", 12.125, ours("compact", compact_weight, grad_half, compact)),
    ]


def _states(format: str, dtype: torch.dtype, parameters: int) -> dict[str, Tensor]:
    specs = kernels.state_arrays(RULE.name, format, dtype)
    return {name: torch.zeros(spec.numel(parameters), dtype=spec.dtype) for name, spec in specs.items()}


def _torch_step(weight: Tensor, grad: Tensor, states: dict[str, Tensor]) -> Callable[[int], None]:
    """torch's fused AdamW over the same buffers as the fp32 case."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)
    optimizer.state[parameter] = {"step": torch.tensor(0.0), **states}

    def run(step: int) -> None:
        optimizer.step()

    return run


def _measure(cases: list[Case], repetitions: int) -> list[Row]:
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for step in range(1, repetitions + 2):  # the first touches the pages and is not counted
        for case in cases:
            start = time.perf_counter()
            case.run(step)
            times[case.name].append(time.perf_counter() - start)
    seconds = {name: median(taken[1:]) for name, taken in times.items()}
    reference = seconds[cases[0].name]
    return [Row(c.name, seconds[c.name], c.bytes_moved, reference / seconds[c.name]) for c in cases]


def _table(rows: list[Row], parameters: int, pool: Pool) -> Table:
    title = f"host AdamW, {parameters / 1e6:.0f}M parameters, {pool.num_threads} threads, {pool.simd}"
    table = Table("state format", "ms", "Gparam/s", "GB/s", "x torch", title=title)
    for row in rows:
        rate = parameters / row.seconds / 1e9
        cells = f"{row.seconds * 1e3:.1f}", f"{rate:.2f}", f"{rate * row.bytes_moved:.1f}", f"{row.ratio:.2f}"
        table.add_row(row.name, *cells)
    return table
