"""Small training jobs that are saved, loaded and compared, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zero.training import Batch, TinyGPT, shard
from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.parsing import read_manifest


class Centre(nn.Module):
    """Subtracts a running mean, as batch norms do, in any dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(x.float().mean(0), 0.1)
        return x - self.running_mean.to(x.dtype)


class Odd(nn.Module):
    """A tiny GPT with everything else that a model may hold: buffers, tied, frozen and scalar parameters."""

    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.body = TinyGPT(width)
        self.body.head.weight = self.body.embedding.weight
        self.norm = Centre(31)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(31, 31)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def loss(self, tokens: Tensor) -> Tensor:
        scores = self.norm(self.body(tokens[:, :-1]).flatten(0, 1)) * self.gain
        return nn.functional.cross_entropy(scores + self.frozen(scores), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-1, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def build(plan: dict[str, Any], *, seed: int = 3, kind: type[nn.Module] = Odd, optimizer: str = "adamw") -> Any:
    """A sharded model and its optimizer."""
    torch.manual_seed(seed)
    model = kind()
    trained = [p for p in model.parameters() if p.requires_grad]
    return shard(model, OPTIMIZERS[optimizer](trained), dict(plan))


def step(model: nn.Module, optimizer: Any, index: int, rank: int, *, micro: int = 1) -> float:
    """One step of `micro` backwards; the last loss."""
    for number in range(micro):
        backward(model, optimizer, index, rank, number)
    optimizer.step()
    optimizer.zero_grad()
    return backward.last  # type: ignore[attr-defined]


def backward(model: nn.Module, optimizer: Any, index: int, rank: int, number: int = 0) -> None:
    # Noise from the global generator, so that random states matter.
    loss = model(Batch(index, number, rank).tokens()) * (1 + 0.1 * torch.rand(()))
    optimizer.scale(loss).backward()
    backward.last = float(loss.detach())  # type: ignore[attr-defined]


def train(model: nn.Module, optimizer: Any, first: int, last: int, rank: int) -> list[float]:
    return [step(model, optimizer, index, rank) for index in range(first, last)]


def whole(folder: str | Path, kinds: set[str] | None = None) -> dict[tuple[str, str], Tensor]:
    """Every tensor of the model and its optimizer in a checkpoint, read whole and verified."""
    manifest = read_manifest(Path(folder))
    with Files(Path(folder), manifest) as files:
        files.check_present()
        return {
            (entry.kind, entry.name): files.read_tensor(entry)
            for entry in manifest.tensors.values()
            if entry.rank is None and (kinds is None or entry.kind in kinds)
        }


def assert_same(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> None:
    assert set(one) == set(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(_bits(value), _bits(other[key])), key


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
