"""The optimizers to choose from, sharded over tiers, compared with themselves on a plain model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.train.corpora import write_texts
from tests.train.jobs import losses, tiny, train, train_on_rank
from unbounded.errors import InputError
from unbounded.train.gpt import GPT, GPTShape
from unbounded.train.options.config import OPTIMIZERS, Config
from unbounded.train.options.settings import close_settings
from unbounded.train.step.optimizer_choice import make_optimizer

SETTINGS = replace(close_settings(Config(), kind="cpu", num_ranks=1), lr=1e-2, weight_decay=0.1)
PRELOAD_IN_RANKS = ["unbounded.train.training", "unbounded.sharding.placing"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_optimizer_does_what_it_does_on_a_plain_model(name: str) -> None:
    torch.manual_seed(0)
    plain = GPT(GPTShape(layers=2, width=16, heads=2, context=8, vocabulary=11))
    model = copy.deepcopy(plain)
    settings = replace(SETTINGS, optimizer=name)
    made = make_optimizer(plain, settings)
    references = made if isinstance(made, list) else [made]
    plan = {"weights": "host", "optimizer": "host"}
    model, optimizer = unbounded.shard(model, make_optimizer(model, settings), plan)
    inputs = torch.randint(11, (4, 8))
    for _ in range(3):
        for one, steppers in ((plain, references), (model, [optimizer])):
            one(inputs).square().mean().backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
    close = {"rtol": 1e-4, "atol": 3e-3 if name == "muon" else 1e-6}  # it works in bf16, with 3 steps of 0.01
    with unbounded.full_params(model):
        for (key, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, msg=lambda text, key=key: f"{key}: {text}", **close)


def test_muon_trains_the_matrices_inside_and_adamw_the_rest() -> None:
    plain = GPT(GPTShape(layers=2, width=16, heads=2, context=8, vocabulary=11))
    made = make_optimizer(plain, replace(SETTINGS, optimizer="muon"))
    assert isinstance(made, list)
    muon, adamw = made
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    held = [{names[id(p)] for group in one.param_groups for p in group["params"]} for one in (muon, adamw)]
    inside = {name for name, p in plain.named_parameters() if p.ndim == 2 and name.startswith("blocks.")}
    assert held == [inside, set(names.values()) - inside]
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert all(group["weight_decay"] == 0.1 for group in muon.param_groups)
    with pytest.raises(InputError, match="no matrix that Muon could train"):
        make_optimizer(nn.Embedding(3, 2), replace(SETTINGS, optimizer="muon"))


def test_a_job_with_muon_is_the_same_on_two_ranks_and_when_it_is_resumed(tmp_path: Path, ranks: Any) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 200)
    config = tiny(tmp_path / "one", texts, optimizer="muon", decay="constant", warmup=1, steps=4)
    train(config)
    other = replace(config, output=str(tmp_path / "two"))
    for steps in (2, 4):
        assert ranks(2, train_on_rank, replace(other, steps=steps)) == [steps] * 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
