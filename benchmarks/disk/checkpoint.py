"""Checkpoints against the raw disk, torch.save and torch.distributed.checkpoint, as ratios within one run.

    python benchmarks/disk/checkpoint.py --path /scratch [--gigabytes 2] [--rounds 3] [--tier host]

Everything writes and reads the same number of bytes on the same disk, in turns of alternating order, so that nobody
always follows the same other; medians are compared. "raw" is one file through the disk engine from
memory that is already there, synced. The peers get the states as plain tensors in memory, in the same dtypes, and
must have them on stable storage too when their time ends. Every save makes new files. Removing those of the turn before
is not timed, since a filesystem that discards blocks takes half a second for 2 GB, whoever wrote them.

"raw read" reads the checkpoint's own file, so that both find the same blocks. If the states are in host memory, it
fills as much memory as the load does: on a virtual machine a pass over gigabytes of memory runs at anything between
1.6 and 3.1 GB/s, a pass into one buffer of 256 MiB always at 3.1. For states elsewhere the buffer is one of that size,
as they pass through buffers too. In both cases the memory has been touched before.

The cost of a save in the background is the time of all steps that it overlaps, compared with as many before and after,
of `--tokens` each. Without a GPU, steps compete for the cores that the save takes and, on a virtual machine, also for
those that carry out its disk's transfers: "steps during a raw write" shows what the disk alone costs them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbounded
from unbounded.native.disk import DiskEngine
from unbounded.native.host_memory import host_buffer, touch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks of 8 x width^2 parameters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class PeakMemory(threading.Thread):
    """The largest growth of the process's own memory while it watches; files in the page cache do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._first = self._peak = _anonymous_bytes()

    def run(self) -> None:
        while not self._over.wait(0.005):
            self._peak = max(self._peak, _anonymous_bytes())

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()
        self.growth = self._peak - self._first


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def build(gigabytes: float, tier: str, precision: str) -> tuple[nn.Module, Any, int]:
    """A model with about so many bytes of states; weights and states on `tier`."""
    width = 1024
    bytes_each = 8 * width * width * 12
    depth = max(2, round(gigabytes * 1e9 / bytes_each))
    device = "cuda" if torch.cuda.is_available() and tier == "device" else "cpu"
    model = Stack(width, depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = {"precision": precision, "weights": tier, "optimizer": tier, "gradients": "host"}
    model, optimizer = unbounded.shard(model, optimizer, plan)
    return model, optimizer, sum(p.numel() for p in model.parameters()) * 12


def take_step(model: nn.Module, optimizer: Any, tokens: int) -> float:
    start = time.perf_counter()
    device = next(model.parameters()).device
    loss = model(torch.randn(tokens, 1024, device=device)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def plain_state(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The same states as plain tensors in memory, for the peers: bf16 weights, 16-bit rest, fp32 moments."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        state[name] = {
            "weight": torch.randn(shape).bfloat16(),
            "remainder": torch.zeros(shape, dtype=torch.int16),
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.rand(shape),
        }
    return state


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Raw:
    """One file of `nbytes` written, or any file read, by the disk engine with memory that is already there."""

    def __init__(self, folder: Path, nbytes: int, buffer_bytes: int = 256 << 20) -> None:
        self.path, self.nbytes = folder / "raw.bin", nbytes
        self.buffer = host_buffer(-(-buffer_bytes // (16 << 20)) * (16 << 20))
        touch(self.buffer, os.cpu_count() or 1)
        self.engine = DiskEngine()

    def write(self) -> None:
        with self.engine.open(self.path, create=True, size_bytes=self.nbytes) as file:
            self._pass(file.write, self.nbytes)
            file.sync()

    def read(self, path: Path) -> None:
        with self.engine.open(path, read_only=True) as file:
            self._pass(file.read, file.size_bytes)

    def _pass(self, move: Any, nbytes: int) -> None:
        handles = []
        for offset in range(0, nbytes, 16 << 20):
            length = min(16 << 20, nbytes - offset)
            position = offset % self.buffer.numel()
            handles.append(move(offset, self.buffer[position : position + length]))
            if len(handles) > 8:
                handles.pop(0).wait()
        for handle in handles:
            handle.wait()


def save_peers(folder: Path, state: Any) -> dict[str, Callable[[], Any]]:
    """torch.save and torch.distributed.checkpoint of the same state, on stable storage like ours."""
    import warnings

    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def torch_save() -> None:
        with open(folder / "torch.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save() -> None:
        dcp.save({"state": state}, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True), no_dist=True)

    return {"torch.save": torch_save, "torch dcp": dcp_save}


def measure(folder: Path, model: nn.Module, optimizer: Any, raw: Raw, rounds: int, peers: bool) -> dict[str, float]:
    """Seconds, by what was measured: medians over `rounds` turns."""
    ours = folder / "ours"
    writes: dict[str, Callable[[], Any]] = {
        "raw write": raw.write,
        "save": lambda: unbounded.save(ours, model, optimizer),
    }
    if peers:
        writes |= save_peers(folder, plain_state(model))
    data = ours / "data-00000.bin"
    reads = {"raw read": lambda: raw.read(data), "load": lambda: unbounded.load(ours, model, optimizer)}
    works = {**writes, **reads}
    seconds: dict[str, list[float]] = {name: [] for name in [*writes, *reads, "CPU of a save"]}
    for turn in range(rounds + 1):
        clear(folder)
        way = -1 if turn % 2 else 1
        for name in [*list(writes)[::way], *list(reads)[::way], *list(reads)[::-way]]:
            cpu = time.process_time()
            spent = timed(works[name])
            if turn:  # the first turn warms up
                seconds[name].append(spent)
                if name == "save":
                    seconds["CPU of a save"].append(time.process_time() - cpu)
    return {name: statistics.median(values) for name, values in seconds.items()}


def clear(folder: Path) -> None:
    """Removes what the works of the last turn have written."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    os.sync()


def measure_memory(folder: Path, model: nn.Module, optimizer: Any) -> dict[str, int]:
    peaks = {}
    clear(folder)
    for name, work in (
        ("save", lambda: unbounded.save(folder / "ours", model, optimizer)),
        ("load", lambda: unbounded.load(folder / "ours", model, optimizer)),
    ):
        with PeakMemory() as peak:
            work()
        peaks[name] = peak.growth
    return peaks


def measure_steps_beside(
    folder: Path, model: nn.Module, optimizer: Any, raw: Raw, tokens: int, rounds: int
) -> dict[str, float]:
    """All the steps that a save in the background overlaps, and a raw write, as ratios to as many without either."""
    alone: list[float] = []

    def save() -> Any:
        return unbounded.save(folder / "ours", model, optimizer, wait=False)

    def write() -> Any:
        return ThreadPoolExecutor(1).submit(raw.write)

    ratios: dict[str, list[float]] = {"save": [], "raw write": []}
    for turn in range(2 * rounds):
        for name, begin in list({"save": save, "raw write": write}.items())[:: -1 if turn % 2 else 1]:
            clear(folder)
            ratios[name].append(_ratio_beside(begin, lambda count: _steps(model, optimizer, tokens, count), alone))
    return {**{name: statistics.median(values) for name, values in ratios.items()}, "alone": statistics.median(alone)}


def _ratio_beside(begin: Callable[[], Any], steps: Callable[[int], float], alone: list[float]) -> float:
    """Includes the step in which the work begins. If a step is longer than the work, it is only that step."""
    before = steps(1)
    start, count = time.perf_counter(), 0
    handle = begin()
    while not count or not handle.done():
        steps(1)
        count += 1
    beside = (time.perf_counter() - start) / count
    (handle.wait if hasattr(handle, "wait") else handle.result)()
    after = steps(count)
    alone += [before, after]
    return beside / ((before + after) / 2)


def _steps(model: nn.Module, optimizer: Any, tokens: int, count: int) -> float:
    """Seconds of each step, including its updates."""
    start = time.perf_counter()
    for _ in range(count):
        take_step(model, optimizer, tokens)
        optimizer.wait()
    return (time.perf_counter() - start) / count


def show(nbytes: int, seconds: dict[str, float], memory: dict[str, int], beside: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "GB/s", "against", "ratio", "goal", title=f"{nbytes / 1e9:.2f} GB of states")
    for name, other, goal in (
        ("raw write", None, ""),
        ("save", "raw write", ">= 0.85"),
        ("save", "torch.save", ">= 3"),
        ("save", "torch dcp", ">= 1.5"),
        ("raw read", None, ""),
        ("load", "raw read", ">= 0.85"),
    ):
        if name in seconds and (other is None or other in seconds):
            ratio = f"{seconds[other] / seconds[name]:.2f}" if other else ""
            table.add_row(name, f"{nbytes / seconds[name] / 1e9:.2f}", other or "", ratio, goal)
    table.add_row("CPU of a save", "", "", f"{seconds['CPU of a save'] / nbytes * 1e9:.3f} s/GB", "")
    alone = f"steps alone ({beside['alone']:.2f} s)"
    table.add_row("steps during a raw write", "", alone, f"{beside['raw write']:.3f}", "")
    table.add_row("steps during a save", "", alone, f"{beside['save']:.3f}", "<= 1.05")
    for name, growth in memory.items():
        table.add_row(f"memory of {name}", "", "", f"{growth / 2**20:.0f} MiB", "< 1 GiB")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="bytes of states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tier", default="host", choices=["device", "host", "disk"])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step during a save")
    parser.add_argument("--no-peers", action="store_true", help="leave out torch's own")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="unbounded-bench-", dir=args.path))
    try:
        model, optimizer, nbytes = build(args.gigabytes, args.tier, "bf16")
        take_step(model, optimizer, 64)
        optimizer.wait()
        raw = Raw(folder, nbytes, nbytes + (16 << 20)) if args.tier == "host" else Raw(folder, nbytes)
        seconds = measure(folder, model, optimizer, raw, args.rounds, not args.no_peers)
        memory = measure_memory(folder, model, optimizer)
        beside = measure_steps_beside(folder, model, optimizer, raw, args.tokens, args.rounds)
        show(nbytes, seconds, memory, beside)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
