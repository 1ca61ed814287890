"""What is random in a model's own code comes out over an axis as on one rank, wherever the code draws it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unbounded
from tests.parallel.comparing import worst_error


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Restless(nn.Module):
    """A block that is random at the places of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.up, self.down = kind, nn.LayerNorm(8), Up(), nn.Linear(16, 8)
        self.before, self.between = nn.Dropout(0.2), nn.Dropout(0.2)
        self.channels, self.alpha = nn.Dropout1d(0.2), nn.AlphaDropout(0.2)
        has_own = kind == "torch's own"
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True) if has_own else Heads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "torch's own":
            x = x + self.heads(x, x, x, need_weights=False)[0]
            x = x * x.new_empty(len(x), 1, 1).bernoulli_(0.8) + torch.empty_like(x).uniform_(0, 0.1)
        else:
            x = x + self.heads(self.before(x))
        if self.kind == "channels":
            x = self.alpha(self.channels(x))
        feed = (lambda x: checkpoint(self.feed, x, use_reentrant=False)) if self.kind == "repeated" else self.feed
        return x + feed(self.before(self.norm(x)))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Restless(kind) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def train(rank: int, size: int, kind: str, plan: dict[str, Any]) -> Any:
    """Losses and the next random number on one rank and over the axis, and how far the weights are apart."""
    torch.manual_seed(3)
    plain = Model(kind)
    model = copy.deepcopy(plain)
    found: list[list[float]] = []
    for one, used in ((plain, {}), (model, plan)):
        optimizer: Any = torch.optim.SGD(one.parameters(), lr=0.1)
        if used:
            one, optimizer = unbounded.shard(one, optimizer, used)
        pipeline = unbounded.pipeline(one) if "pipeline" in used else None
        torch.manual_seed(7)
        numbers = []
        for step in range(3):
            x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))
            parts = x.chunk(plan.get("microbatches", 1))
            losses = [pipeline(x)] if pipeline is not None else [one(part) / len(parts) for part in parts]
            for loss in () if pipeline is not None else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(float(sum(losses)))
        found.append([*numbers, float(torch.rand(()))])
    return *found, worst_error(model.state_dict(), plain.state_dict())


STYLES = (("blocks.*.up.linear", "column"), ("blocks.*.down", "row"))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("torch's own", {"pipeline": 2, "microbatches": 2}),
        ("channels", {"pipeline": 2, "microbatches": 2, "schedule": "interleaved"}),
        ("between", {"tensor": 2, "styles": STYLES}),
        ("between", {"tensor": 2, "styles": STYLES, "activations": "recompute"}),
        ("channels", {"tensor": 2, "styles": STYLES, "sequence": True, "activations": "recompute"}),
        ("channels", {"context": 2}),
    ],
)
def test_what_is_random_is_that_of_one_rank(ranks: Any, kind: str, plan: dict[str, Any]) -> None:
    for wanted, found, worst in ranks(2, train, kind, plan):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("plan", [{"tensor": 2, "styles": STYLES}, {"context": 2}])
def test_dropout_that_would_be_another_when_a_part_of_a_block_runs_again_is_refused(ranks: Any, plan: Any) -> None:
    for message in ranks(2, refuse, plan):
        assert "runs in a torch.utils.checkpoint of a part of the block" in message


def refuse(rank: int, size: int, plan: dict[str, Any]) -> str:
    with pytest.raises(unbounded.StateError) as caught:
        train(rank, size, "repeated", plan)
    return str(caught.value)
