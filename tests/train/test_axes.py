"""The training job over tensor, pipeline and context axes: the losses of one rank, whatever mesh it resumes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.parallel import models
from tests.parallel.comparing import optimizer_of, without_dropout
from tests.train.corpora import write_texts
from tests.train.jobs import losses, tiny, train, train_on_rank
from unbounded.errors import InputError
from unbounded.observe.metrics import read_metrics
from unbounded.parallel import collectives
from unbounded.train.data.tokenizer import IGNORED
from unbounded.train.options.flags import make_config
from unbounded.train.options.settings import close_settings
from unbounded.train.step.objective import MicroBatch, summed_loss

PRELOAD_IN_RANKS = ["unbounded.train.training", "unbounded.sharding.placing"]


def evaluations(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl", "eval")]


def test_a_job_moves_from_mesh_to_mesh_with_the_losses_of_one_rank(
    tmp_path: Path, ranks: Callable[..., list[Any]]
) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 600)
    config = tiny(
        tmp_path / "one", texts, layers=4, decay="constant", warmup=1, eval_fraction=0.05, eval_every=2, sample="the "
    )
    config = replace(config, sample_tokens=3, steps=8)
    sample = train(config).sample
    moving = replace(config, output=str(tmp_path / "moving"))
    meshes: list[tuple[int, int, dict[str, Any]]] = [
        (2, 2, {"tensor": 2}),
        (4, 4, {"pipeline": 2, "tensor": 2}),
        (2, 6, {"pipeline": 2, "plan": (("schedule", "interleaved"), ("optimizer", "host"))}),
        (2, 8, {"context": 2}),
    ]
    for world_size, steps, axes in meshes:
        found = ranks(world_size, train_and_count, replace(moving, steps=steps, **axes))
        # A context axis joins its sequence after the last block; logits stay parts of the vocabulary.
        assert found == [(steps, "context" in axes)] * world_size
    assert losses(tmp_path / "moving") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert evaluations(tmp_path / "moving") == pytest.approx(evaluations(tmp_path / "one"), rel=1e-5)
    assert sample == ranks(2, sample_on_rank, replace(moving, tensor=2))[0]


def train_and_count(rank: int, world_size: int, config: Any) -> tuple[int, bool]:
    """The steps done, and whether ranks joined something in a step."""
    plain, joined = collectives.join, []

    def join(*args: Any) -> Any:
        joined.append(torch.is_grad_enabled())
        return plain(*args)

    collectives.join = join  # type: ignore[assignment]
    try:
        return train_on_rank(rank, world_size, config), any(joined)
    finally:
        collectives.join = plain


def sample_on_rank(rank: int, world_size: int, config: Any) -> str:
    return train(config).sample


def losses_of_transformers(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Loss and norm of a model whose head ranks share; BERT's head runs only on the hidden tokens."""
    found = []
    for family in ("llama", "bert"):
        model = without_dropout(models.build(family))
        batch = models.batch(family, 0)
        places = (batch["labels"].flatten() != IGNORED).nonzero().flatten() if family == "bert" else None
        part = MicroBatch(batch["input_ids"], batch["labels"], places=places)
        plain = summed_loss(model, part)
        plain.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        model = without_dropout(models.build(family))
        model, optimizer = unbounded.shard(model, optimizer_of(model), {"tensor": 2})
        head = model.get_output_embeddings()
        widths: list[int] = []
        head.register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))  # noqa: B023
        loss = summed_loss(model, part)
        loss.backward()
        assert widths == [(18, 17)[rank]]  # of 35 classes
        found += [(float(loss), float(plain)), (float(optimizer.clip_grad_norm_(1e9)), float(norm))]
    return found


def test_heads_of_transformers_models_give_each_rank_its_part_of_the_logits(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(2, losses_of_transformers):
        assert [one for one, _ in found] == pytest.approx([wanted for _, wanted in found], rel=1e-5)


def test_flags_say_how_a_batch_goes_through_a_pipeline() -> None:
    config = make_config({"tensor": 2, "pipeline": 2, "sequence_length": 32, "batch_tokens": 512, "steps": 1})
    closed = close_settings(config, kind="cpu", num_ranks=2)
    assert closed.shard_plan == {
        "precision": "fp32",
        "activations": "host",
        "tensor": 2,
        "pipeline": 2,
        "microbatches": 4,
    }
    assert closed.micro_batch == 2  # of the 8 sequences of a rank: two parts for every stage
    given = make_config({"pipeline": 2, "plan": (("microbatches", 8),), "sequence_length": 32, "batch_tokens": 512})
    assert close_settings(given, kind="cpu", num_ranks=2).micro_batch == 1
    with pytest.raises(InputError, match=r"microbatches=8 does not fit the 8 sequences .* and --micro-batch 4"):
        close_settings(replace(given, micro_batch=4), kind="cpu", num_ranks=2)
    with pytest.raises(InputError, match=r"--pipeline and --plan pipeline=... contradict each other"):
        make_config({"pipeline": 2, "plan": (("pipeline", 2),)})
