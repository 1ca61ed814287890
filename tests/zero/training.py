"""Trains the same task twice, in plain PyTorch and sharded, so that tests only say what the task is.

The reference is the specification of data parallel training written out: every rank runs its own batch on its own
whole model, gradients are averaged over the ranks (a rank that did not use a parameter counts as zero, a parameter
that no rank used keeps no gradient), and a stock `torch.optim` optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unbounded

TOLERANCE = 1e-6
"""Largest relative error (in the 2-norm of a tensor) that fp32 training may have against its reference."""


class Task:
    """A model, its optimizer, and the loss of one microbatch; tests override what they are about."""

    steps = 3
    accumulate = 1
    max_norm: float | None = None

    def model(self) -> nn.Module:
        return TinyGPT()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # eps: at 1e-8 Adam's first step is the sign of a gradient, even of one that is only rounding.
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model.loss(batch.tokens())

    def backward(self, loss: Tensor, batch: Batch) -> None:
        (loss / self.num_microbatches(batch.step)).backward()

    def num_microbatches(self, step: int) -> int:
        return self.accumulate

    def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Runs after every step."""


@dataclass(frozen=True)
class Batch:
    """Which microbatch this is; its data depends only on its place."""

    step: int
    micro: int
    rank: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(1 + self.step * 1009 + self.micro * 101 + self.rank)

    def tokens(self, rows: int = 3, length: int = 5, vocabulary: int = 31) -> Tensor:
        return torch.randint(vocabulary, (rows, length), generator=self.generator())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator())


class Several:
    """Optimizers that are stepped one after another, as people write it."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = list(members)
        self.param_groups = [group for member in members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()


class Block(nn.Module):
    """A residual block with every kind of small parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class TinyGPT(nn.Module):
    """Embedding, residual blocks, head; 11 wide, so that nothing divides by the number of ranks."""

    def __init__(self, width: int = 11, depth: int = 3, vocabulary: int = 31) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """What a training run is compared by."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(task: Task, model: nn.Module, optimizer: Any, *, rank: int, finish: Callable[[], float | None]) -> Run:
    """The loop a user would write; `finish` is what happens between the last backward and the step."""
    torch.manual_seed(7)
    run, scheduler = Run(), task.scheduler(optimizer)
    for step in range(task.steps):
        for micro in range(task.num_microbatches(step)):
            batch = Batch(step, micro, rank)
            loss = task.loss(model, batch)
            task.backward(loss, batch)
            run.losses.append(float(loss.detach().sum()))
        norm = finish()
        if norm is not None:
            run.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        task.between(model, optimizer, step)
    return run


def train_plain(task: Task, model: nn.Module, *, rank: int, world_size: int) -> Run:
    """The reference run: gradients averaged over the ranks, a stock optimizer."""
    optimizer = task.optimizer(model)

    def finish() -> float | None:
        average_gradients(model, world_size)
        if task.max_norm is None:
            return None
        return float(nn.utils.clip_grad_norm_(model.parameters(), task.max_norm))

    run = train(task, model, optimizer, rank=rank, finish=finish)
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def average_gradients(model: nn.Module, world_size: int) -> None:
    if world_size == 1:
        return
    parameters = list(model.parameters())
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(used)
    dist.all_reduce(flat)
    pieces = (flat / world_size).split([p.numel() for p in parameters])
    for parameter, is_used, piece in zip(parameters, used.tolist(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter.dtype) if is_used else None


@contextmanager
def small_units(numel: int | None) -> Iterator[None]:
    """Leaf modules of at least `numel` elements become their own units, so that tiny models have many."""
    from unbounded.zero.setup import sites

    before = sites.SMALL_NUMEL
    sites.SMALL_NUMEL = before if numel is None else numel
    try:
        yield
    finally:
        sites.SMALL_NUMEL = before


def shard(model: nn.Module, optimizer: Any, plan: dict[str, Any]) -> tuple[nn.Module, Any]:
    """`unbounded.shard` with one more key in the plan, `unit_numel`, for `small_units`."""
    plan = {"stage": 3, "precision": "fp32", **plan}
    with small_units(plan.pop("unit_numel", 64)):
        return unbounded.shard(model, optimizer, plan)


def train_sharded(task: Task, model: nn.Module, plan: dict[str, Any], *, rank: int) -> Run:
    """The same loop on `unbounded.shard`."""
    model, optimizer = shard(model, task.optimizer(model), plan)

    def finish() -> float | None:
        return None if task.max_norm is None else optimizer.clip_grad_norm_(task.max_norm)

    run = train(task, model, optimizer, rank=rank, finish=finish)
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def train_both(rank: int, world_size: int, task: Task, plan: dict[str, Any]) -> tuple[Run, Run]:
    """The reference and the sharded run of one task from one set of initial weights."""
    torch.manual_seed(3)
    model = task.model()
    reference = train_plain(task, copy.deepcopy(model), rank=rank, world_size=world_size)
    return reference, train_sharded(task, model, plan, rank=rank)


def train_ours(rank: int, world_size: int, task: Task, plan: dict[str, Any]) -> Run:
    """The sharded run alone, from the same initial weights as `train_both`."""
    torch.manual_seed(3)
    return train_sharded(task, task.model(), plan, rank=rank)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """In the 2-norm. Elements count as 0.1 at least: a bias that began at zero is a sum of steps that cancel."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.abs().clamp_min(0.1).norm().clamp_min(0.1))


def assert_parity(results: list[tuple[Run, Run]], tolerance: float = TOLERANCE) -> None:
    """Losses, norms and final weights of every rank equal the reference's; all ranks hold the same weights."""
    for rank, (reference, ours) in enumerate(results):
        assert ours.losses, "the task made no step"
        assert list(ours.weights) == list(reference.weights)
        torch.testing.assert_close(ours.losses, reference.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.norms, reference.norms, rtol=tolerance, atol=tolerance)
        errors = {name: relative_error(ours.weights[name], value) for name, value in reference.weights.items()}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= tolerance, f"rank {rank}: {worst} is off by {errors[worst]:.1e} of its norm"
    for _, ours in results:
        assert_identical_weights(ours, results[0][1])


def assert_identical_weights(one: Run, other: Run) -> None:
    assert list(one.weights) == list(other.weights)
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), f"{name} differs in {int((value != other.weights[name]).sum())}"


def assert_identical(one: Run, other: Run) -> None:
    """Bit by bit the same losses and weights."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert_identical_weights(one, other)
