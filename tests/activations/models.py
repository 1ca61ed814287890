"""Models whose blocks are called in every way, and the gradients they give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unbounded.activations.first_run import SMALL_BYTES

WIDTH = 12


class Layer(nn.Module):
    """The common part of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Any:
        return self.mix(x)


class Stack(nn.Module):
    """Embedding, blocks, head; `run` says how a block is called."""

    block: type[Layer] = Layer

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Masked(Layer):
    def forward(self, x: Tensor, *, mask: Tensor, rotary: tuple[Tensor, Tensor], scale: float = 1.0) -> Any:
        cos, sin = rotary
        return {"x": self.mix(x * cos + x * sin * scale).masked_fill(mask, 0.5), "extra": [x.detach()]}


class WithMask(Stack):
    """Keyword arguments, tensors without gradient shared by all blocks, a dict as the output."""

    block = Masked

    def forward(self, tokens: Tensor) -> Tensor:
        where = {"device": tokens.device}
        self.mask = (torch.arange(WIDTH, **where) % 5 == 0).expand(*tokens.shape, WIDTH)
        self.rotary = (torch.linspace(0.5, 1.0, WIDTH, **where), torch.linspace(-1.0, 1.0, WIDTH, **where))
        try:
            return super().forward(tokens)
        finally:
            del self.mask, self.rotary

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, mask=self.mask, rotary=self.rotary, scale=0.25)["x"]


class Given(Layer):
    def forward(self, x: Tensor, *, table: Any) -> Any:
        while not isinstance(table, Tensor):
            table = table["of"] if isinstance(table, dict) else table.x if isinstance(table, State) else table[0]
        return self.mix(x) * table[: x.shape[1]]


class WithTable(Stack):
    """All blocks receive a weight, by itself or inside something, as where relative positions have a table."""

    block = Given

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.nest: Callable[[Tensor], Any] = lambda table: table

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, table=self.nest(self.table.weight))


@dataclass
class State:
    x: Tensor
    seen: list[Tensor]
    note: str = ""


class Passing(Layer):
    def forward(self, state: State) -> Any:
        total = sum(state.seen, torch.zeros_like(state.x))
        return State(self.mix(state.x + total), [*state.seen[-1:], state.x * 0.1], state.note + ".")


class WithDataclass(Stack):
    """Dataclasses in and out, several tensors with gradients inside."""

    block = Passing

    def forward(self, tokens: Tensor) -> Tensor:
        state = State(self.embedding(tokens), [])
        for block in self.blocks:
            state = block(state)
        assert state.note == "." * len(self.blocks)
        return nn.functional.cross_entropy(self.head(state.x).flatten(0, 1), tokens.flatten())


class Dropping(Layer):
    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.mix(x), 0.3, self.training)


class WithDropout(Stack):
    block = Dropping


class Transposing(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.mix(x.transpose(0, 1)).transpose(0, 1)[..., :]


class Transposed(Stack):
    """Inputs that are not contiguous, and one that is a slice of a wider tensor."""

    block = Transposing

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(torch.cat([x, x], -1)[..., WIDTH:])


class Frozen(Stack):
    """The first block has nothing to train and an input without gradient; the third is frozen in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[3].norm.requires_grad_(False)


class Hooked(Stack):
    """One hook of the user changes inputs, another changes outputs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda _, args, output: output * 0.9)


class Looped(Stack):
    """Every block runs twice."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(block(x))


class Changing(Layer):
    """A block whose forward changes attributes, and its buffers in every way: statistics, in place, and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.up = nn.utils.parametrizations.spectral_norm(self.up)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 3 * SMALL_BYTES))  # large, never changed
        self.register_buffer("seen", torch.zeros(SMALL_BYTES))  # large, changed in every run
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.alias = nn.Module()
        self.alias.register_buffer("seen", self.seen)
        self.scale, self.runs, self.last = 1.0, 0, None

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
            self.seen[: x.numel()] += x.detach().flatten()
            self.runs += 1
            self.last = x * self.runs
        x = x * self.scale + self.mean + self.alias.seen[:WIDTH] * self.table[:WIDTH]
        x = self.mix(nn.functional.dropout(x, 0.3, self.training))
        return self.batch(x.flatten(0, 1)).view_as(x)


class Changed(Stack):
    block = Changing


class Remembering(Layer):
    """A block whose forward depends on whatever a module can have, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = torch.zeros(WIDTH)
        self.log: list[float] = []
        self.counts, self.inner = Counter[str](), {"runs": [0]}
        self.own = torch.Generator().manual_seed(3), random.Random(3), np.random.RandomState(3)
        self.drawn = np.random.default_rng(3)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Any:
        carried = self.carried.detach() if hasattr(self, "carried") else torch.zeros_like(x)
        self.trace.lerp_(x.detach().mean((0, 1)), 0.5)
        self.log.append(float(self.trace.sum()))
        self.counts["runs"] += 1
        self.inner["runs"][0] += 1
        factor = random.random() + np.random.rand() + self.own[1].random() + self.own[2].rand() + self.drawn.random()
        factor += len(self.log) + self.counts["runs"] + self.inner["runs"][0]
        x = x * torch.rand(WIDTH, generator=self.own[0]) * (1 + self.trace) * (1 + carried)
        x = x * torch.rand(WIDTH, generator=given["torch"][0]) * given["python"].random()
        self.carried = self.mix(torch.sin(x * factor))
        return self.carried


class Remembered(Stack):
    """Blocks that are also given generators, which all of them draw from."""

    block = Remembering

    def __init__(self) -> None:
        super().__init__()
        self.given = {"torch": [torch.Generator().manual_seed(4)], "python": random.Random(4)}

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, given=self.given)


class Deep(Layer):
    def forward(self, x: Tensor) -> Any:
        def inner(y: Tensor) -> Tensor:
            return self.mix(y)

        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)


class CheckpointedInside(Stack):
    """Blocks with the user's own checkpoint inside."""

    block = Deep


class CheckpointedAround(Stack):
    """Blocks with the user's own checkpoint around them."""

    reentrant = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)


class CheckpointedAroundReentrant(CheckpointedAround):
    reentrant = True


ALL = (
    *(Stack, WithMask, WithDataclass, WithDropout, Transposed, Frozen, Hooked, Looped),
    *(CheckpointedInside, CheckpointedAround, CheckpointedAroundReentrant),
)


def tokens(seed: int = 0, rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(seed))


def make(kind: type[Stack]) -> Stack:
    torch.manual_seed(1)
    return kind()


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The loss and every gradient, from the same random numbers each time."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit by bit."""
    assert len(found) == len(expected) > 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def losses_of(model: nn.Module, optimizer: Any, batches: Iterable[Tensor] | None = None) -> list[float]:
    """The losses of a training step with each batch; by default three of `tokens`."""
    found = []
    for batch in batches if batches is not None else map(tokens, range(3)):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found
