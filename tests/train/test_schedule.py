"""Learning rates over a run, groups of weight decay, and a loss that does not depend on how a batch is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unbounded.planner.step.logits import TILE_BYTES
from unbounded.train.gpt import GPT, GPTShape
from unbounded.train.step.learning_rate import lr_factor
from unbounded.train.step.objective import MicroBatch, summed_loss
from unbounded.train.step.optimizer_choice import weight_decay_groups


def test_the_rate_rises_over_the_warm_up_and_falls_to_its_end() -> None:
    for decay, middle in (("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)):
        factor = lr_factor(steps=14, warmup=4, decay=decay, final=0.1)
        assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert factor(9) == pytest.approx(middle)
        assert factor(14) == pytest.approx(1.0 if decay == "constant" else 0.1)
        assert factor(99) == factor(14)


def test_matrices_decay_and_norms_biases_and_embeddings_do_not() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[3].weight.requires_grad_(False)
    decayed, others = weight_decay_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["1.weight"]
    assert {names[id(p)] for p in others["params"]} == {"0.weight", "1.bias", "2.weight", "2.bias", "3.bias"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_the_loss_in_tiles_has_the_value_and_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(layers=1, width=16, heads=2, context=8, vocabulary=11))
    inputs, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
    targets[1, 2:] = -100
    results = []
    for rows in (24, 5):  # five do not divide the 24
        monkeypatch.setitem(TILE_BYTES, "cpu", rows * 11 * 4)
        loss = summed_loss(model, MicroBatch(inputs, targets))
        results.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[0], results[1])


def test_the_gpt_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(layers=2, width=16, heads=2, context=8, vocabulary=11))
    inputs = torch.randint(11, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(inputs), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])
