"""Every family of models on every axis and pair of axes trains as on one rank: losses, norms and weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

import tests.ranks
import unbounded
from tests.parallel import models
from tests.parallel.comparing import MAX_NORM, check, compare, optimizer_of, without_dropout, worst_error
from tests.parallel.meshes import DEALT_FOUR, DEALT_TWO, EIGHT, FAMILIES, FOUR, SCHEDULES, TWO, Plan, few_blocks

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def compare_on(ranks: Any, size: int, family: str, plans: list[Plan]) -> None:
    """With as few blocks as the plans need."""
    staged = [plan for plan in plans if "pipeline" in plan]
    cut = [plan for plan in plans if "pipeline" not in plan]
    for some, changes in ((cut, few_blocks(family)), (staged, {})):
        if some:
            check(ranks(size, compare, family, some, changes))


@pytest.mark.every_second
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_one_with_dropout_on(ranks: Any, family: str) -> None:
    compare_on(ranks, 2, family, [TWO[name] for name in DEALT_TWO[family]])


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family not in FAMILIES])
def test_other_families_are_cut_over_a_tensor_axis(ranks: Any, family: str) -> None:
    names = ["tensor", "tensor, sequence", *(["1f1b"] if family == "llama4" else [])]
    compare_on(ranks, 2, family, [TWO[name] for name in names])


@pytest.mark.every_second
@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_train_as_one(ranks: Any, family: str) -> None:
    compare_on(ranks, 4, family, [FOUR[name] for name in DEALT_FOUR[family]])


def accumulate(model: Any, optimizer: Any, run: Any) -> list[float]:
    """Three steps of two batches each, clipped."""
    numbers = []
    for step in range(3):
        for number in range(2):
            loss = run(**models.batch("gpt2", step, number))
            if loss.requires_grad:
                loss.backward()
            numbers.append(float(loss))
        clip = getattr(optimizer, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, list(model.parameters())))
        numbers.append(float(clip(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def accumulate_over(rank: int, size: int, plans: list[dict[str, Any]]) -> list[Any]:
    plain = without_dropout(models.build("gpt2"))
    expected = accumulate(plain, optimizer_of(plain), lambda **batch: plain(**batch).loss)
    results = []
    for plan in plans:
        model = without_dropout(models.build("gpt2"))
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        run = unbounded.pipeline(model) if "pipeline" in plan else lambda **batch: model(**batch).loss  # noqa: B023
        found = accumulate(model, optimizer, run)
        results.append((expected, found, worst_error(model.state_dict(), plain.state_dict())))
    return results


def test_gradients_add_up_over_batches_on_every_axis(ranks: Any) -> None:
    plans = [TWO["tensor, sequence"], TWO["context"], {"pipeline": 2, "microbatches": 2, "gradients": "disk"}]
    check(ranks(2, accumulate_over, plans))


def test_data_tensor_and_pipeline_over_eight_ranks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.ranks, "MAX_RANKS", 8)
    check(ranks(8, compare, "llama", [EIGHT["data, tensor, pipeline"]], {}))


def test_every_mesh_is_some_familys() -> None:
    for dealt, meshes in ((DEALT_TWO, TWO), (DEALT_FOUR, FOUR)):
        assert {name for names in dealt.values() for name in names} == set(meshes)
        assert set(dealt) == set(FAMILIES)
    assert {plan["schedule"] for plan in TWO.values() if "schedule" in plan} == set(SCHEDULES)
