"""Weak scaling of one training step on CPU ranks: ours, DDP, FSDP2 and FSDP2 with parallelize_module, as ratios.

    python benchmarks/steps/parallel_scaling.py --ranks 2 4 8
    python benchmarks/steps/parallel_scaling.py --ranks 2 --profile "unbounded, stage 3"

Every system trains the same model with the same rows per rank. All are built in the same processes and take turns, step
by step, so that a busy machine is busy for all of them. A round gives the ratio of each to FSDP2 in that round. What is
printed is the median over the rounds, for the time of the step and for the CPU seconds that all ranks spent in it. If
ranks share cores, the second says what a system costs, whatever else runs. Only ratios at one number of ranks are
meaningful. A step of a pipeline has two micro-batches for each stage, which leaves a bubble of a quarter.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, DEPTH, ROWS, WARMUP = 256, 8, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


STYLES = (("blocks.*.up", "column"), ("blocks.*.down", "row"))


def ours(plan: dict[str, Any]) -> Callable[[int], tuple[Callable[[torch.Tensor], Any], Any, int]]:
    def build(size: int) -> tuple[Callable[[torch.Tensor], Any], Any, int]:
        import unbounded

        model = Model()
        model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
        rows = ROWS * plan.get("tensor", 1) * plan.get("pipeline", 1)
        if "pipeline" in plan:
            return unbounded.pipeline(model, loss=loss_of), optimizer, rows
        return lambda x: loss_of(model(x)).backward(), optimizer, rows

    return build


def ddp(size: int) -> tuple[Callable[[torch.Tensor], Any], Any, int]:
    model = nn.parallel.DistributedDataParallel(Model())
    return lambda x: loss_of(model(x)).backward(), torch.optim.AdamW(model.parameters()), ROWS


def fsdp(size: int, tensor: int = 1) -> tuple[Callable[[torch.Tensor], Any], Any, int]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Model()
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        if tensor > 1:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return lambda x: loss_of(model(x)).backward(), torch.optim.AdamW(model.parameters()), ROWS * tensor


SYSTEMS: dict[str, Callable[[int], tuple[Callable[[torch.Tensor], Any], Any, int]]] = {
    "DDP": ddp,
    "FSDP2": fsdp,
    "FSDP2 + parallelize_module 2": lambda size: fsdp(size, 2),
    "unbounded, stage 3": ours({"stage": 3}),
    "unbounded, tensor 2": ours({"stage": 3, "tensor": 2, "styles": STYLES}),
    "unbounded, pipeline 2": ours({"stage": 3, "pipeline": 2, "microbatches": 4}),
}


def measure(rank: int, size: int, port: int, rounds: int, profiled: str, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    running = {name: build(size) for name, build in SYSTEMS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    profile = cProfile.Profile()
    for number in range(WARMUP + rounds):
        for name, (run, optimizer, rows) in running.items():
            x = torch.ones(rows, WIDTH)
            dist.barrier()
            if name == profiled and rank == 0 and number >= WARMUP:
                profile.enable()
            start, cpu = time.perf_counter(), time.process_time()
            run(x)
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(optimizer, "wait"):
                optimizer.wait()
            spent = torch.tensor([time.process_time() - cpu])
            dist.all_reduce(spent)
            profile.disable()
            if number >= WARMUP:
                times[name].append((time.perf_counter() - start, float(spent)))
    if rank == 0:
        results.update(times)
        if profiled:
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    dist.barrier()
    dist.destroy_process_group()


def ratios(times: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """For every system, the median over the rounds of its ratios to FSDP2, in time and in CPU seconds."""
    found = {}
    for name, own in times.items():
        pairs = list(zip(own, times["FSDP2"], strict=True))
        found[name] = statistics.median(a[0] / b[0] for a, b in pairs), statistics.median(a[1] / b[1] for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profile", default="", choices=["", *SYSTEMS], help="also show where rank 0 spends its time")
    chosen = parser.parse_args()
    for size in chosen.ranks:
        results = mp.Manager().dict()
        mp.spawn(measure, (size, 29500 + size, chosen.rounds, chosen.profile, results), nprocs=size)
        print(f"{size} ranks, a step as a ratio to FSDP2 (below 1 is better):        time   CPU seconds")
        for name, (seconds, cpu) in ratios(dict(results)).items():
            print(f"  {name:64} {seconds:5.2f}   {cpu:5.2f}")


if __name__ == "__main__":
    main()
