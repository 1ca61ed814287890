"""The optimizers to choose from, sharded over tiers, against themselves on a plain model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import unbounded
from unbounded.train.gpt import GPT, GPTShape
from unbounded.train.options.config import OPTIMIZERS, Config
from unbounded.train.options.settings import close_settings
from unbounded.train.step.optimizers import make_optimizer
from unbounded.train.step.schedule import weight_decay_groups

SETTINGS = replace(close_settings(Config(), kind="cpu", world_size=1), lr=1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_optimizer_does_what_it_does_on_a_plain_model(name: str) -> None:
    torch.manual_seed(0)
    plain = GPT(GPTShape(layers=2, width=16, heads=2, context=8, vocabulary=11))
    model = copy.deepcopy(plain)
    settings = replace(SETTINGS, optimizer=name)
    reference = make_optimizer(weight_decay_groups(plain, 0.1), settings)
    optimizer = make_optimizer(weight_decay_groups(model, 0.1), settings)
    model, optimizer = unbounded.shard(model, optimizer, {"weights": "host", "optimizer": "host"})
    inputs = torch.randint(11, (4, 8))
    for _ in range(3):
        for one, steps in ((plain, reference), (model, optimizer)):
            one(inputs).square().mean().backward()
            steps.step()
            steps.zero_grad()
    with unbounded.full_params(model):
        for (key, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, msg=lambda text, key=key: f"{key}: {text}", rtol=1e-4, atol=1e-6)
