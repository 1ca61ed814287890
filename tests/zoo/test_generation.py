"""Text generation with a sharded model, between steps: the tokens of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import unbounded
from tests.zero.training import small_units
from tests.zoo.architectures import ARCHITECTURES, batch
from tests.zoo.test_zoo import optimizer_of
from unbounded.errors import StateError

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def generate(rank: int, world_size: int, name: str, stage: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(5)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    plain = copy.deepcopy(model)
    with small_units(100):
        model, optimizer = unbounded.shard(model, optimizer_of(model), {"stage": stage, "precision": "fp32"})
    plain_optimizer = optimizer_of(plain)
    tokens: tuple[list[Any], list[Any]] = ([], [])
    for step in range(2):
        for seen, network, steps in zip(tokens, (plain, model), (plain_optimizer, optimizer), strict=True):
            network.train()
            network(**batch(architecture, step, 0)).loss.backward()
            steps.step()
            steps.zero_grad()
            network.eval()
            prompt = batch(architecture, 9, 0)["input_ids"]
            seen.append(network.generate(prompt, max_new_tokens=6, do_sample=False).tolist())
    return tokens


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_a_sharded_model_generates_what_the_plain_one_does(ranks: Any, name: str, world_size: int, stage: int) -> None:
    for plain, ours in ranks(world_size, generate, name, stage):
        assert ours == plain


def generate_apart(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Answers of another length on each rank, of the sharded model; then of copies of it, on the first rank alone."""
    torch.manual_seed(5)
    model = ARCHITECTURES["llama"].build().eval()
    prompt = batch(ARCHITECTURES["llama"], 9, rank)["input_ids"]
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False}
    plain = model.generate(prompt, **options).tolist()
    with small_units(100):
        model, _ = unbounded.shard(model, optimizer_of(model), {"stage": 3, "precision": "fp32"})
    found = [model.generate(prompt, **options).tolist()]
    with pytest.raises(StateError, match=r"prompt lookup.*synced_gpus=False"):
        model.generate(prompt[:1], **options, prompt_lookup_num_tokens=2)
    looked_up = {**options, "prompt_lookup_num_tokens": 2, "synced_gpus": False}
    with unbounded.full_params(model):
        found.append([model.generate(row[None], **looked_up)[0].tolist() for row in prompt])
    copied = copy.deepcopy(model)
    unbounded.unshard(model)
    if rank == 0:
        found += [network.generate(prompt, **options).tolist() for network in (copied, model)]
    return [plain] * len(found), found


def test_ranks_generate_answers_of_different_lengths(ranks: Any) -> None:
    for plain, ours in ranks(2, generate_apart):
        assert ours == plain
