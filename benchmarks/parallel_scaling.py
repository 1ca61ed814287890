"""Weak scaling of one training step on CPU ranks: ours beside DDP, FSDP2 and FSDP2 with parallelize_module, as ratios.

    python benchmarks/parallel_scaling.py --ranks 2 4

Every system trains the same model with the same rows a rank, taking turns. All ranks share this machine's cores, so
only the ratios between systems at the same number of ranks mean anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, DEPTH, ROWS, STEPS = 256, 8, 16, 8


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


def measure(rank: int, size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    running = {name: build(size) for name, build in SYSTEMS.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(STEPS):  # taking turns, so that a busy machine is busy for all
        for name, (run, optimizer, rows) in running.items():
            x = torch.ones(rows, WIDTH)
            dist.barrier()
            start = time.perf_counter()
            run(x)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if rank == 0:
        results.update({name: sorted(found)[len(found) // 2] for name, found in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    for size in parser.parse_args().ranks:
        results = mp.Manager().dict()
        mp.spawn(measure, (size, 29500 + size, results), nprocs=size)
        base = results["FSDP2"]
        print(f"{size} ranks, time of a step as a ratio to FSDP2 (below 1 is faster):")
        for name, seconds in results.items():
            print(f"  {name:32} {seconds / base:5.2f}")


if __name__ == "__main__":
    main()
