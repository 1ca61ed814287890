"""Context parallelism: sequences cut between ranks train as whole ones on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.parallel import models
from tests.parallel.comparing import compare, optimizer_of, train_parallel
from tests.parallel.test_pipeline import compare as compare_pipeline
from tests.parallel.test_tensor import check

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_two_parts_of_a_sequence_train_as_one_rank_with_dropout_on(ranks: Any, family: str) -> None:
    check(ranks(2, compare, family, [{"context": 2}], {}))


def test_context_goes_with_data_tensor_and_pipeline(ranks: Any) -> None:
    plans: list[dict[str, Any]] = [{"context": 2, "stage": 3}, {"context": 2, "tensor": 2, "optimizer": "host"}]
    check(ranks(4, compare, "llama", plans, {}))
    check(ranks(4, compare_pipeline, "gpt2", [{"context": 2, "pipeline": 2, "microbatches": 2}]))


def save_and_load(rank: int, size: int, folder: str) -> Any:
    model = models.build("gpt2")
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"context": 2})
    train_parallel(model, optimizer, "gpt2", steps=2)
    unbounded.save(folder, model, optimizer)
    other = models.build("gpt2")
    other, other_optimizer = unbounded.shard(other, optimizer_of(other), {"tensor": 2})
    unbounded.load(folder, other, other_optimizer)
    found, wanted = other.state_dict(), model.state_dict()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def test_what_ranks_of_a_context_hold_is_saved_once(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, save_and_load, str(tmp_path)) == [[], []]


def refusals(rank: int, size: int, kind: str) -> str:
    changes = {"attn_implementation": "eager"} if kind == "eager" else {}
    model = models.build("gpt2", **changes)
    batch = models.batch("gpt2", 0, length=7 if kind == "odd" else 8)
    if kind == "mask":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :3] = 0
    try:
        model, _ = unbounded.shard(model, optimizer_of(model), {"context": 2})
        model(**batch)
    except unbounded.UnboundedError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("kind", "wanted"), [("eager", "attention is 'eager'"), ("odd", "7 tokens"), ("mask", "gives its attention a mask")]
)
def test_attention_that_cannot_be_cut_is_refused(ranks: Any, kind: str, wanted: str) -> None:
    for message in ranks(2, refusals, kind):
        assert wanted in message
