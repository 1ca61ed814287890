"""Trains on long sequences with the inputs of all blocks on the host, and shows where the bytes are:
python examples/activations.py            # or with another policy: keep, recompute
"""

import sys

import torch
from torch import nn

import unbounded

WIDTH, DEPTH, LENGTH = 32, 8, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)

    def forward(self, x):
        return self.attend(x)


device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 8)).to(device)
policy = sys.argv[1] if len(sys.argv) > 1 else "host"
model, optimizer = unbounded.shard(blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-3), {"activations": policy})
for step in range(5):
    series = torch.randn(2, LENGTH + 1, 8, device=device).cumsum(1) / LENGTH**0.5
    loss = nn.functional.mse_loss(model(series[:, :-1]), series[:, 1:])
    on_host = optimizer.memory()["host"].activation_bytes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, {on_host / 2**20:.1f} MiB of activations on the host")
