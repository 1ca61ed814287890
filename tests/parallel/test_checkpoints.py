"""Checkpoints of parallel jobs load under any other mesh, and full values come out of each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import unbounded
from tests.parallel import models
from tests.parallel.comparing import MAX_NORM, optimizer_of, train_plain, without_dropout, worst_error

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def advance(model: Any, optimizer: Any, family: str, steps: range) -> list[float]:
    """Every rank with the same batches, so that the mesh makes no difference to the result."""
    run = unbounded.pipeline(model) if optimizer.engine.axes.pipeline.size > 1 else lambda **b: model(**b).loss
    losses = []
    for step in steps:
        loss = run(**models.batch(family, step))
        if loss.requires_grad:
            loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def fresh(family: str, plan: dict[str, Any]) -> tuple[Any, Any]:
    model = without_dropout(models.build(family))
    return unbounded.shard(model, optimizer_of(model), plan)


def travel(rank: int, size: int, family: str, plans: list[dict[str, Any]], folder: str) -> Any:
    """Trains two steps under each plan, saving after each and loading under the next."""
    reference = without_dropout(models.build(family))
    wanted = train_plain(copy.deepcopy(reference), family, steps=2 * len(plans))[::2]
    losses, step = [], 0
    for number, plan in enumerate(plans):
        model, optimizer = fresh(family, plan)
        if number:
            assert unbounded.load(f"{folder}/{number - 1}", model, optimizer) == {"number": number - 1}
        losses += advance(model, optimizer, family, range(step, step + 2))
        step += 2
        unbounded.save(f"{folder}/{number}", model, optimizer, number=number)
    train_plain(reference, family, steps=2 * len(plans))
    unbounded.export(f"{folder}/export", model)
    return losses, wanted, worst_error(model.state_dict(), reference.state_dict()), reference.state_dict()


MESHES: list[dict[str, Any]] = [
    {"tensor": 2, "stage": 3},
    {"tensor": 4, "sequence": True},
    {"pipeline": 2, "tensor": 2, "optimizer": "host"},
    {"pipeline": 4, "optimizer": "disk"},
    {"stage": 2},
    {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "microbatches": 2},
]


@pytest.mark.parametrize("family", ["gpt2"])  # matrices of three sections, tied embeddings
def test_a_checkpoint_goes_from_mesh_to_mesh(ranks: Any, tmp_path: Path, family: str) -> None:
    results = ranks(4, travel, family, MESHES, str(tmp_path))
    for losses, wanted, worst, _ in results:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert worst[0] < 1e-4, worst
    weights = results[0][3]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, value in exported.items():
        assert (value - weights[name]).norm() <= 1e-4 * weights[name].norm() + 1e-6
    assert set(weights) - set(exported) <= {"lm_head.weight"}  # tied to the embedding in GPT-2
