"""Trains a small language model on the bytes of this file, sharded over the ranks there are:
python examples/minimal.py                              # one process
torchrun --nproc-per-node 2 examples/minimal.py         # any number of ranks
"""

import os
import pathlib

import torch
from torch import nn

import unbounded


class Model(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x, mask = self.embedding(tokens), nn.Transformer.generate_square_subsequent_mask(len(tokens))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


if "RANK" in os.environ:
    torch.distributed.init_process_group()
data = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
model = Model()
model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
for step in range(20):
    rows = torch.stack([data[i : i + 33] for i in torch.randint(len(data) - 33, (8,))], dim=1)
    loss = nn.functional.cross_entropy(model(rows[:-1]).flatten(0, 1), rows[1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
