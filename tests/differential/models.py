"""A model with whatever units can have in them, chosen by a `ModelSpec`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 23


@dataclass(frozen=True)
class ModelSpec:
    width: int
    blocks: tuple[str, ...]  # a kind each, or "again": the block before, once more in the list
    tied: bool  # the head has the embedding's weight
    looped: bool  # all blocks run twice
    borrowed: bool  # the root uses a weight of the first block
    frozen: tuple[str, ...]  # prefixes of parameters
    skips: str  # which blocks a forward leaves out: "none", "together", or "apart" by rank


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width + 3), nn.Linear(width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Lora(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, width) / 4), nn.Parameter(torch.randn(width, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


class Partly(nn.Module):
    """A parameter that never runs, one that only some batches use, and one of no dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.never, self.sometimes = (nn.Linear(width, width) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, *, also: bool = False) -> Tensor:
        y = self.used(x)
        return x + torch.tanh(y + self.sometimes(x) if also else y) * self.gain


class Nested(nn.Module):
    """Blocks inside a block, and a parameter of its own around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Mlp(width), Mlp(width)])
        self.shift = nn.Parameter(torch.randn(width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x) + self.shift
        return x


KINDS = {"mlp": Mlp, "lora": Lora, "partly": Partly, "nested": Nested}


class Net(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, spec.width)
        self.place = nn.Parameter(torch.randn(5, spec.width) / 4)
        blocks: list[nn.Module] = []
        for kind in spec.blocks:
            blocks.append(blocks[-1] if kind == "again" else KINDS[kind](spec.width))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=not spec.tied)
        if spec.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.startswith(spec.frozen):
                parameter.requires_grad_(False)

    def forward(self, tokens: Tensor, seed: int = 0, rank: int = 0) -> Tensor:
        draw = random.Random(seed * 31 + (rank if self.spec.skips == "apart" else 0))
        x = self.embedding(tokens) + self.place
        for _ in range(1 + self.spec.looped):
            for block in self.blocks:
                if self.spec.skips != "none" and draw.random() < 0.3:
                    continue
                x = block(x, also=draw.random() < 0.5) if isinstance(block, Partly) else block(x)
        if self.spec.borrowed:
            borrowed = next(p for p in self.blocks[0].parameters() if p.dim() == 2 and p.shape[1] == self.spec.width)
            x = x + F.linear(x, borrowed[:1]).tanh()
        return self.head(x)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    seed = 1 + step * 1009 + micro * 101
    tokens = torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(seed * 7 + rank))
    return F.cross_entropy(model(tokens[:, :-1], seed, rank).float().flatten(0, 1), tokens[:, 1:].flatten())
