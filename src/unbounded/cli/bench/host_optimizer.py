"""`unbounded bench host`: the host optimizer compared with torch's fused AdamW in one run.

Cases take turns, repetition by repetition, so that other load on the machine hits all of them alike; the ratio is of
median times. Ours work in host buffers, where training keeps its states, and torch in its own memory, where its users
have them. A row of torch on the tensors of the fp32 case shows how much comes from the buffers.
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

from unbounded.errors import PlanError
from unbounded.native import kernels
from unbounded.native.host_memory import available_bytes, host_buffer
from unbounded.native.kernels import Pool, Rule
from unbounded.planner.sizes import format_bytes

RULE = Rule("adamw", lr=1e-4, weight_decay=0.01)
REFERENCE = "torch AdamW(fused=True)"
_BYTES_PER_PARAMETER = 64  # of all cases at once: 32 in fp32 twice, 12 and 5 in the two formats, gradients


@dataclass(frozen=True)
class Case:
    """One optimizer step to time; `bytes_moved` is the traffic of one parameter, read and written."""

    name: str
    bytes_moved: float
    run: Callable[[int], None]


@dataclass(frozen=True)
class Timing:
    name: str
    seconds: float
    bytes_moved: float
    ratio: float  # reference time / this time


def run_host(
    *, parameters: int = 100_000_000, threads: int | None = None, repetitions: int = 7, console: Console | None = None
) -> list[Timing]:
    """Measures AdamW in every state format against torch and prints a table; returns its rows."""
    needed, free = parameters * _BYTES_PER_PARAMETER, available_bytes()
    if needed > free:
        raise PlanError(
            f"{parameters:,} parameters take {format_bytes(needed)} in all formats together, but only "
            f"{format_bytes(free)} of host memory are free. Give fewer --parameters."
        )
    threads = threads or kernels.default_pool().num_threads
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Pool(threads) as pool:
            rows = _measure(cases(parameters, pool), repetitions)
            (console or Console()).print(_table(rows, parameters, pool))
    finally:
        torch.set_num_threads(before)
    return rows


def cases(parameters: int, pool: Pool) -> list[Case]:
    """torch's step, and ours in every format, over arrays of their own."""
    weight, grad = torch.randn(parameters) * 0.02, torch.randn(parameters) * 1e-3
    states = {name: torch.zeros(parameters) for name in ("exp_avg", "exp_avg_sq")}
    full, full_grad = _held(weight), _held(grad)
    full_states = _states("fp32", torch.float32, parameters)
    half_grad = _held(grad.to(torch.bfloat16))

    def ours(format: str, weight: Tensor, grad: Tensor, states: dict[str, Tensor]) -> Callable[[int], None]:
        def run(step: int) -> None:
            rule = Rule(RULE.name, lr=RULE.lr, weight_decay=RULE.weight_decay, step=step)
            kernels.update(rule, format, weight=weight, grad=grad, states=states, pool=pool)

        return run

    def half(format: str) -> Callable[[int], None]:
        states = _states(format, torch.bfloat16, parameters)
        return ours(format, _held(weight.to(torch.bfloat16)), half_grad, states)

    return [
        Case(REFERENCE, 28, _torch_step(weight, grad, states)),
        Case("torch, in host buffers", 28, _torch_step(full, full_grad, full_states)),
        Case("fp32", 28, ours("fp32", full, full_grad, full_states)),
        Case("exact, bf16 gradient", 26, half("exact")),
        Case("compact, bf16 gradient", 12.125, half("compact")),
    ]


def _held(tensor: Tensor) -> Tensor:
    """A copy in a host buffer."""
    return host_buffer(tensor.nbytes).view(tensor.dtype).copy_(tensor)


def _states(format: str, dtype: torch.dtype, parameters: int) -> dict[str, Tensor]:
    specs = kernels.state_arrays(RULE.name, format, dtype)
    return {name: _held(torch.zeros(spec.numel(parameters), dtype=spec.dtype)) for name, spec in specs.items()}


def _torch_step(weight: Tensor, grad: Tensor, states: dict[str, Tensor]) -> Callable[[int], None]:
    """torch's fused AdamW over these buffers."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)
    optimizer.state[parameter] = {"step": torch.tensor(0.0), **states}

    def run(step: int) -> None:
        optimizer.step()

    return run


def _measure(cases: list[Case], repetitions: int) -> list[Timing]:
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for step in range(1, repetitions + 2):  # the first touches the pages and is not counted
        for case in cases:
            start = time.perf_counter()
            case.run(step)
            times[case.name].append(time.perf_counter() - start)
    seconds = {name: median(taken[1:]) for name, taken in times.items()}
    reference = seconds[cases[0].name]
    return [Timing(c.name, seconds[c.name], c.bytes_moved, reference / seconds[c.name]) for c in cases]


def _table(rows: list[Timing], parameters: int, pool: Pool) -> Table:
    title = f"host AdamW, {parameters / 1e6:.0f}M parameters, {pool.num_threads} threads, {pool.simd}"
    table = Table("state format", "ms", "Gparam/s", "GB/s", "x torch", title=title)
    for row in rows:
        rate = parameters / row.seconds / 1e9
        cells = f"{row.seconds * 1e3:.1f}", f"{rate:.2f}", f"{rate * row.bytes_moved:.1f}", f"{row.ratio:.2f}"
        table.add_row(row.name, *cells)
    return table
