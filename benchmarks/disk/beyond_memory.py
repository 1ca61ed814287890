"""Trains a model whose states are larger than the machine's memory: the rest of them live on its disk.

    python benchmarks/disk/beyond_memory.py --params 2.2e9 --host 6GiB --device 3GiB --path /scratch

A stack of residual blocks is made on the meta device, so that no process ever holds it whole, and trained in bf16
with `exact` states: 12 bytes per parameter, and gradients. The batch is tiny and the same in every step, because the
disk is what is measured, and the loss must fall. A step ends when all of its updates have been applied. The peak of the
resident set is that of the whole process so far, the interpreter, torch and activations included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unbounded
from unbounded.planner.sizes import format_bytes
from unbounded.sharding.running import sharded

COLUMNS = "{:>6} {:>9} {:>9} {:>18} {:>10} {:>10} {:>10}"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """As many blocks of `width` as come nearest to `num_params` parameters."""

    def __init__(self, num_params: int, width: int) -> None:
        super().__init__()
        per_block = sum(parameter.numel() for parameter in Block(width).parameters())
        self.blocks = nn.ModuleList(Block(width) for _ in range(max(1, round(num_params / per_block))))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=2.2e9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--device", default="3GiB", help="device_bytes of the plan")
    parser.add_argument("--host", default="6GiB", help="host_bytes of the plan")
    parser.add_argument(
        "--path", default=None, help="folder of the disk tier (default: a temporary one in the current folder)"
    )
    return parser.parse_args()


def build(options: argparse.Namespace, folder: str) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = Stack(int(options.params), options.width).bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5
    )  # small: 66 blocks deep, every first step of Adam is a full one
    plan = {"precision": "bf16", "device_bytes": options.device, "host_bytes": options.host, "disk_path": folder}
    return unbounded.shard(model, optimizer, plan)


def state_bytes(model: nn.Module) -> dict[str, int]:
    """The bytes of weights and optimizer states on every tier; buffers, gathered units and gradients not counted."""
    held = dict.fromkeys(("device", "host", "disk"), 0)
    for unit in sharded(model).engine.units:
        for array in (unit.weights, *unit.states.values()):
            held[array.tier] += array.numel * array.dtype.itemsize
    return held


def read_kib(path: str, key: str) -> int:
    """A line of /proc like "VmHWM:  1024 kB", in bytes."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def train(model: nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (1, options.tokens, options.width)
    batch, target = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    memory = read_kib("/proc/meminfo", "MemTotal")
    print(COLUMNS.format("step", "seconds", "loss", "peak RSS of memory", "device", "host", "disk"))
    for step in range(options.steps):
        start = time.perf_counter()
        loss = nn.functional.mse_loss(model(batch.bfloat16()).float(), target)
        loss.backward()
        value = float(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        peak = read_kib("/proc/self/status", "VmHWM")
        used = [format_bytes(use.used_bytes) for use in optimizer.memory().values()]
        row = (step, f"{time.perf_counter() - start:.1f}", f"{value:.4f}")
        print(COLUMNS.format(*row, f"{format_bytes(peak)} ({peak / memory:.0%})", *used), flush=True)


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    folder = options.path or os.getcwd()
    with tempfile.TemporaryDirectory(prefix="beyond-memory-", dir=folder) as path:
        start = time.perf_counter()
        model, optimizer = build(options, path)
        held, memory = state_bytes(model), read_kib("/proc/meminfo", "MemTotal")
        numel = sum(parameter.numel() for parameter in model.parameters())
        print(f"{numel / 1e9:.2f}B parameters, sharded in {time.perf_counter() - start:.1f} s")
        where = ", ".join(f"{format_bytes(count)} on {tier}" for tier, count in held.items())
        total = sum(held.values())
        print(f"states: {format_bytes(total)}, {total / numel:.1f} bytes per parameter: {where}")
        print(f"the machine's memory: {format_bytes(memory)}; the states are {total / memory:.2f} x that", flush=True)
        train(model, optimizer, options)
        sharded(model).tiers.close()


if __name__ == "__main__":
    main()
