"""Measures each rate of this machine with the work that training does: the fastest of a few repetitions.

What a CPU computes with is measured at three moments, seconds apart, of which the middle one counts: most of a step
depends on it, and other programs on the machine may slow it down for a while.

Shapes are those of steps, not the ones that are fastest: products of a few thousand tokens with matrices of a few
thousand rows, forwards and backwards; elementwise operations over tensors that no cache holds; both as far as a whole
transformer block reaches them; the host's own fused optimizer and additions; the disk engine with several transfers in
flight.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.machine.additions import measure_additions
from unbounded.machine.block import block_seconds, reached_rates
from unbounded.machine.disk import measure_disk
from unbounded.machine.libraries import measure_libraries
from unbounded.machine.timing import least_seconds, sustained_seconds
from unbounded.native import kernels
from unbounded.native.host_memory import available_bytes, host_buffer
from unbounded.native.kernels import Pool, Rule
from unbounded.planner.step.streaming import UPDATED
from unbounded.tiers.arena import HostArena

COMPACTED = 12.125  # bytes per parameter that AdamW of the compact format reads and writes; of the exact one UPDATED


def measure(disk_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The fields of a `Machine`, measured here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(disk_path) if disk_path is not None else Path(tempfile.gettempdir())
    began = time.perf_counter()
    moments = [_look(device)]
    values = {**_measure_links(device), **_measure_host()}
    if device.type == "cpu":
        moments.append(_look(device))
    values |= {**measure_additions(device), **measure_disk(folder)}
    if device.type == "cpu":
        moments.append(_look(device))
    values |= {**measure_libraries(), **_device_rates(device, moments)}
    free = available_bytes()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with is free again
        name, on_device = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
        host = int(free * 0.9)
    else:
        name, on_device = platform.processor() or platform.machine(), int(free * 0.9) * 2 // 3
        host = int(free * 0.9) - on_device
    taken = time.perf_counter() - began
    return {
        **values,
        "name": f"{name} on {platform.node()}",
        "device_bytes": on_device,
        "host_bytes": max(1, host),
        "disk_bytes": int(shutil.disk_usage(folder).free * 0.95),
        "devices": max(1, torch.cuda.device_count()),
        "is_cpu": device.type == "cpu",
        "sources": {"all": f"measured in {taken:.1f} s with torch {torch.__version__} on {time.strftime('%Y-%m-%d')}"},
    }


@dataclass(frozen=True)
class _Moment:
    """What products, memory-bound operations and launching an operation reached alone, and what a block took."""

    alone: Mapping[str, float]
    block_seconds: float


def _look(device: torch.device) -> _Moment:
    alone = {
        "matmul_flops": _matmul_flops(device, torch.bfloat16 if device.type == "cuda" else torch.float32),
        "device_bandwidth": _elementwise_rate(device),
        "kernel_seconds": _kernel_seconds(device),
    }
    return _Moment(alone, block_seconds(device))


def _device_rates(device: torch.device, moments: Sequence[_Moment]) -> dict[str, float]:
    """What all of them reach inside a block. Of these moments the one counts in which a block took the median time."""
    moment = sorted(moments, key=lambda moment: moment.block_seconds)[len(moments) // 2]
    reached = reached_rates(device, dict(moment.alone), moment.block_seconds)
    if device.type == "cuda":
        return {**reached, "fp32_flops": _matmul_flops(device, torch.float32)}
    return {
        **reached,
        "matmul_flops": _matmul_flops(device, torch.bfloat16),
        "fp32_flops": reached["matmul_flops"],
    }


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Over the products of a step: forward, gradient of the input, gradient of the weight; square, wide and narrow. On
    a CPU they go on, like those of a block. In 16 bits, for which many CPUs have no instructions, there is less to do.
    """
    is_gpu = device.type == "cuda"
    is_brief = not is_gpu and dtype != torch.float32
    tokens, hidden, wide = (8192, 4096, 11008) if is_gpu else (256 if is_brief else 1024, 256, 704)
    flops, parts = 0.0, []
    for rows, columns in ((hidden, hidden), (hidden, wide), (wide, hidden)):
        x = torch.randn(tokens, rows, device=device, dtype=dtype)
        weight = torch.randn(columns, rows, device=device, dtype=dtype)
        upstream = torch.randn(tokens, columns, device=device, dtype=dtype)
        parts.append((x, weight, upstream))
        flops += 3 * 2 * tokens * rows * columns

    def work() -> None:
        for x, weight, upstream in parts:
            nn.functional.linear(x, weight)
            upstream @ weight
            upstream.t() @ x

    if is_brief:
        return flops / least_seconds(work, device, 2)
    return flops / (least_seconds if is_gpu else sustained_seconds)(work, device)


def _elementwise_rate(device: torch.device) -> float:
    """Over the operations of a norm as models write it: into fp32, squared, averaged, scaled, back, weighted."""
    rows, width = (2**16, 4096) if device.type == "cuda" else (2**12, 1024)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = torch.ones(rows, width, device=device, dtype=dtype), torch.ones(width, device=device, dtype=dtype)
    # Results have their place: the first use of memory that was just allocated would take as long as the work on a CPU.
    wide = torch.empty_like(x, dtype=torch.float32) if dtype != torch.float32 else x
    squares, scale = torch.empty_like(wide), torch.empty_like(wide[:, :1])
    narrow = torch.empty_like(x) if dtype != torch.float32 else squares
    result = torch.empty_like(x)

    def work() -> None:
        if wide is not x:
            wide.copy_(x)
        torch.mean(torch.pow(wide, 2, out=squares), -1, keepdim=True, out=scale)
        torch.mul(wide, scale.add_(1e-6).rsqrt_(), out=squares)
        if narrow is not squares:
            narrow.copy_(squares)
        torch.mul(weight, narrow, out=result)

    # A tensor that already has the dtype is not copied.
    num_bytes = (6 + 8 + 4 + 8 + 6 + 4) if dtype == torch.bfloat16 else (8 + 4 + 8 + 8)
    return num_bytes * x.numel() / least_seconds(work, device)


def _kernel_seconds(device: torch.device) -> float:
    """The least time of an operation in a chain of modules with gradients: Python's and torch's, not the device's."""
    with device:  # whatever the caller's default is
        layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))]
    model, x = nn.Sequential(*layers).float(), torch.randn(4, 16, dtype=torch.float32, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would slow down such small operations, which is not Python's time
    try:
        return least_seconds(lambda: model(x), device) / len(model)
    finally:
        torch.set_num_threads(before)


def _measure_links(device: torch.device) -> dict[str, float]:
    """Copies between host and device, alone and both ways; on a CPU copies within its memory."""
    if device.type != "cuda":
        source, target = (host_buffer(2**27) for _ in range(2))
        rate = source.nbytes / least_seconds(lambda: target.copy_(source), device)
        return {"to_device": rate, "to_host": rate, "both_ways": rate, "link_bandwidth": rate}
    arena = HostArena(pin=True, num_threads=os.cpu_count() or 1)
    hosts = [arena.allocate(torch.uint8, 2**29) for _ in range(2)]
    devices = [torch.empty(2**29, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    size = hosts[0].nbytes
    up = size / least_seconds(lambda: devices[0].copy_(hosts[0], non_blocking=True), device)
    down = size / least_seconds(lambda: hosts[1].copy_(devices[1], non_blocking=True), device)
    each = size / least_seconds(both, device)
    for host in hosts:
        arena.release(host)
    arena.close()
    count = max(1, torch.cuda.device_count())
    return {"to_device": up, "to_host": down, "both_ways": min(up, down, each), "link_bandwidth": up * count}


def _measure_host() -> dict[str, float]:
    """The host's fused AdamW on one thread and on all, and what plain copies get out of memory that no cache holds."""
    threads = os.cpu_count() or 1
    numel = 2**24 if threads <= 4 else 2**27
    weight, grad = (host_buffer(2 * numel).view(torch.bfloat16) for _ in range(2))
    weight.fill_(0.01)
    grad.fill_(0.001)
    memory = [host_buffer(4 * numel) for _ in range(5)]  # one array for each format
    cpu = torch.device("cpu")

    def rate(state_format: str, num_threads: int, part: int) -> float:
        """Elements per second."""
        specs = kernels.state_arrays("adamw", state_format, torch.bfloat16)
        states = {
            name: raw[: spec.numel(part) * spec.dtype.itemsize].view(spec.dtype)
            for (name, spec), raw in zip(specs.items(), memory, strict=False)
        }
        with Pool(num_threads) as pool:
            rule = Rule("adamw", lr=1e-4, weight_decay=0.01)

            def work() -> None:
                kernels.update(rule, state_format, weight=weight[:part], grad=grad[:part], states=states, pool=pool)

            return part / least_seconds(work, cpu, 3)

    alone, together = UPDATED * rate("exact", 1, numel // 8), UPDATED * rate("exact", threads, numel)
    plain = 2 * memory[0].nbytes / least_seconds(lambda: memory[1].copy_(memory[0]), cpu)
    is_full = together < 0.9 * threads * alone  # then memory is the kernel's limit, whatever a copy reaches
    return {
        "host_bandwidth": together if is_full else max(together, plain),
        "host_threads": threads,
        "host_thread_rate": max(together / threads, min(alone, together)),
        "host_compact_rate": COMPACTED * rate("compact", threads, numel) / threads,
    }
