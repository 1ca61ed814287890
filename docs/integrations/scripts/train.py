"""A job that any launcher can start, and that continues where it was when it is started again.

python train.py FOLDER [STEPS]        or under torchrun, srun, a PyTorchJob
"""

import sys

import torch
from torch import nn

import unbounded


def main(folder: str, steps: int = 6) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = unbounded.shard(model, optimizer)  # joins the ranks that the launcher started
    try:
        first = unbounded.load(f"{folder}/latest", model, optimizer)["step"]
    except FileNotFoundError:
        first = 0
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_distributed else (0, 1)
    for step in range(first, steps):
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        unbounded.save(f"{folder}/latest", model, optimizer, step=step + 1)
        print(f"rank {rank} of {size}: step {step + 1}, loss {loss.item():.6f}", flush=True)
    if is_distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
