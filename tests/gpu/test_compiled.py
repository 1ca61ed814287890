"""Compiled blocks on a GPU: attention with dropout by our own kernels, and training with what replaces operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded

pytestmark = pytest.mark.gpu
ALL = 0xFFFFFFFF


def mix(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & ALL
    h = ((h ^ (h >> 15)) * 0x846CA68B) & ALL
    return h ^ (h >> 16)


def kept(seed: int, shape: torch.Size, p: float) -> Tensor:
    """Which probabilities the kernels keep, computed by torch."""
    batch, heads, length, _ = shape
    numbers = torch.arange(batch * heads * length, device="cuda").view(-1, length, 1)
    rows = mix((mix((numbers + (seed & ALL)) & ALL) + ((seed >> 32) & ALL)) & ALL)
    columns = mix((torch.arange(length, device="cuda") + ((seed >> 16) & ALL)) & ALL) | 1
    return (((rows * columns) & ALL) >= round(p * 2**32)).view(batch, heads, length, length)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [7, 100, 128, 300, 512])
def test_attention_with_dropout_is_what_its_formula_says(length: int, is_causal: bool) -> None:
    from unbounded.compiled.attention_with_dropout import _attend

    torch.manual_seed(0)
    joined = torch.randn(2, length, 3, 3, 64, device="cuda", dtype=torch.bfloat16)  # as after one product for all
    q, k, v = (joined[:, :, part].transpose(1, 2).detach().requires_grad_() for part in range(3))
    result, _, seed = _attend(q, k, v, 0.1, is_causal, 0.2, 0)
    grad = torch.randn_like(result)
    found = result, *torch.autograd.grad(result, (q, k, v), grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    mask = kept(int(seed), result.shape, 0.1)
    assert float(mask.double().mean()) == pytest.approx(0.9, abs=0.03 if length > 7 else 0.15)
    scores = exact[0] @ exact[1].transpose(-1, -2) * 0.2
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(mask).triu(1), -torch.inf)
    wanted = (scores.softmax(-1) * mask / 0.9) @ exact[2]
    for one, other in zip(found, (wanted, *torch.autograd.grad(wanted, exact, grad.double())), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.01


def test_more_heads_than_a_grid_takes_are_left_to_torch() -> None:
    from unbounded.compiled.attention_with_dropout import MOST_HEADS, attention

    query = torch.randn(MOST_HEADS // 8 + 1, 8, 16, 64, device="cuda", dtype=torch.bfloat16)
    assert attention(query, query, query, dropout_p=0.1, place=0).isfinite().all()


def train_bert(policy: str, how: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    transformers = pytest.importorskip("transformers")
    from unbounded.compiled import attention_kernels

    calls = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    forward = attention_kernels.forward
    monkeypatch.setattr(attention_kernels, "forward", count)
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    model: nn.Module = transformers.BertForMaskedLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = unbounded.shard(model, optimizer, {"compile": how, "activations": policy})
    tokens = torch.randint(128, (8, 64), device="cuda")
    torch.manual_seed(1)
    losses = []
    for _ in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    monkeypatch.undo()
    return losses, calls


def test_a_model_with_dropout_learns_compiled_and_recomputing_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, calls = train_bert("keep", True, monkeypatch)
    again, more = train_bert("recompute", True, monkeypatch)
    assert calls == 2 * 12
    assert more == 2 * calls
    assert again == pytest.approx(kept, rel=2e-3)  # what is dropped is the same; sums may be rounded otherwise
    plain, none = train_bert("keep", False, monkeypatch)
    assert none == 0
    assert kept[-1] == pytest.approx(plain[-1], rel=0.1)
    assert kept[-1] < kept[0] - 1
