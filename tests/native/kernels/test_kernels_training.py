"""The compact format trains like the exact one, on a small model with a real loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.native.kernels.kernel_runs import decode, empty_states, encode
from unbounded.native import kernels
from unbounded.native.kernels import Rule

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the jovial queen. " * 40


class TinyTransformer(nn.Module):
    """Two blocks over characters."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.randn(32, width) * 0.02)
        layer = [nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList(layer)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train_model(format: str, rule: Rule, *, dtype: torch.dtype, seed: int, steps: int = 150) -> list[float]:
    """Losses of a model whose weights live in one flat buffer of the format, computed in fp32 from its weights."""
    torch.manual_seed(seed)
    model = TinyTransformer()
    parameters = list(model.parameters())
    master = torch.cat([p.detach().flatten() for p in parameters])
    states = empty_states(rule, format, dtype, master.numel())
    weight = encode(master, format, dtype, states)
    data, generator = torch.tensor([ord(c) for c in TEXT]), torch.Generator().manual_seed(1)
    losses = []
    for step in range(1, steps + 1):
        nn.utils.vector_to_parameters(weight.float(), parameters)
        starts = torch.randint(0, len(data) - 33, (16,), generator=generator)
        batch = torch.stack([data[i : i + 33] for i in starts])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).to(dtype)
        kernels.update(replace(rule, step=step), format, weight=weight, grad=grads, states=states)
        losses.append(loss.item())
    assert decode(weight, format, states).isfinite().all()
    return losses


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (Rule("adamw", lr=3e-3, weight_decay=0.1), torch.bfloat16),
        (Rule("adamw", lr=3e-3, beta2=0.95, weight_decay=0.1), torch.float16),
        (Rule("lion", lr=3e-4, beta2=0.99, weight_decay=0.1), torch.bfloat16),
    ],
)
def test_compact_reaches_the_loss_of_exact(rule: Rule, dtype: torch.dtype) -> None:
    """The whole curve is the same to a percent. Where it ends is noise in every format, so the end is averaged."""
    finals = {"exact": 0.0, "compact": 0.0}
    for seed in range(2):
        exact = train_model("exact", rule, dtype=torch.bfloat16, seed=seed)
        compact = train_model("compact", rule, dtype=dtype, seed=seed)
        assert sum(compact) < 1.01 * sum(exact)
        finals["exact"] += sum(exact[-50:]) / 50
        finals["compact"] += sum(compact[-50:]) / 50
        assert sum(exact[-50:]) / 50 < 0.75 * exact[0]
    assert finals["compact"] < 1.08 * finals["exact"]
