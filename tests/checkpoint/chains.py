"""Random models whose checkpoints are passed on from layout to layout: `python -m tests.checkpoint.chains FIRST LAST`.

Each chain (one per seed) trains a small model of odd sizes, saves it, and loads and saves it again under other numbers
of ranks, stages and tiers. Every checkpoint must hold the bits of the first.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unbounded
from tests.checkpoint.jobs import assert_same, whole
from tests.ranks import close_ranks, run_ranks

HOPS = 4
TIERS = ("device", "host", "disk")
SHAPES = ((), (0,), (1,), (3,), (5, 7), (2, 3, 4), (64,), (4096,), (1031,))
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=1e-2),
}


class Odd(nn.Module):
    """Parameters of any shape in the root, and blocks of any width; some are tied, some are frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width = draw.choice((1, 2, 7, 16, 33, 64))
        self.loose = nn.ParameterList(torch.randn(draw.choice(SHAPES)) for _ in range(draw.randrange(8)))
        self.blocks = nn.ModuleList(self._make_block(draw) for _ in range(draw.randrange(1, 5)))
        self.register_buffer("table", torch.randn(draw.randrange(1, 9)))
        if len(self.blocks) > 1 and draw.random() < 0.3:
            self.blocks[-1][0].weight = self.blocks[0][0].weight
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() > 0.15)
        self.blocks[0][0].weight.requires_grad_(True)

    def _make_block(self, draw: random.Random) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(self.width, self.width, bias=draw.random() < 0.5)]
        if draw.random() < 0.5:
            layers.append(nn.LayerNorm(self.width))
        if draw.random() < 0.3:
            layers += [nn.Linear(self.width, 3 * self.width), nn.Linear(3 * self.width, self.width)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean() + sum(part.float().square().sum() for part in self.loose)


def draw_layout(draw: random.Random) -> tuple[int, dict[str, Any]]:
    """A number of ranks and a plan."""
    stage = draw.randrange(4)
    plan: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        plan["optimizer"] = draw.choice(TIERS)
    if stage == 3:
        plan["weights"] = draw.choice(TIERS)
    return draw.randrange(1, 5), plan


def build(seed: int, common: dict[str, Any], plan: dict[str, Any], value: float | None = None) -> tuple[Any, Any]:
    """With `value`, all of the model has it before it is sharded."""
    model = Odd(seed)
    for tensor in (*model.parameters(), *model.buffers()) if value is not None else ():
        tensor.data.fill_(value)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    middle = common["group_size"] % len(trained)
    groups = [{"params": part} for part in (trained[:middle], trained[middle:]) if part]
    optimizer = OPTIMIZERS[common["optimizer"]](groups)
    model, optimizer = unbounded.shard(model, optimizer, {**common["plan"], **plan})
    return model, optimizer


def begin(rank: int, world_size: int, seed: int, common: dict[str, Any], plan: dict[str, Any], target: str) -> None:
    model, optimizer = build(seed, common, plan)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, model.width).to(next(model.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    unbounded.save(target, model, optimizer)


def pass_on(
    rank: int, world_size: int, seed: int, common: dict[str, Any], plan: dict[str, Any], source: str, target: str
) -> None:
    model, optimizer = build(seed, common, plan, value=9.0)
    unbounded.load(source, model, optimizer)
    unbounded.save(target, model, optimizer)


def run_chain(seed: int, folder: Path, hops: int = HOPS) -> list[tuple[int, dict[str, Any]]]:
    """Passes one model on; raises if a checkpoint differs from the first. Returns the layouts."""
    draw = random.Random(1000 + seed)
    precision, optimizer = draw.choice(("fp32", "fp32", "bf16")), draw.choice([*OPTIMIZERS])
    formats = ("exact", "compact") if precision == "bf16" and optimizer == "AdamW" else ("exact",)
    common = {
        "optimizer": optimizer,
        "group_size": draw.randrange(20),
        "plan": {"precision": precision, "optimizer_format": draw.choice(formats)},
    }
    layouts = [draw_layout(draw) for _ in range(hops + 1)]
    (num_ranks, plan), *others = layouts
    run_ranks(num_ranks, begin, seed, common, plan, str(folder / "0"))
    first = whole(folder / "0")
    for number, (num_ranks, plan) in enumerate(others, 1):
        source, target = folder / str(number - 1), folder / str(number)
        run_ranks(num_ranks, pass_on, seed, common, plan, str(source), str(target))
        assert_same(whole(target), first)
    return layouts


def run_chains(first: int, last: int, run_chain: Callable[[int, Path], object]) -> int:
    """Runs chains by their seeds and names those that are wrong. Returns the exit code."""
    wrong = []
    for seed in range(first, last):
        try:
            with tempfile.TemporaryDirectory() as folder:
                run_chain(seed, Path(folder))
        except Exception as error:  # the next chains may show whether it is one fault or several
            wrong.append(seed)
            print(f"chain {seed}: {type(error).__name__}: {str(error)[-500:]}", flush=True)
    close_ranks()
    print(f"{last - first} chains, {len(wrong)} wrong {wrong or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_chains(int(sys.argv[1]), int(sys.argv[2]), run_chain))
