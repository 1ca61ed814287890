"""Every family of models on every axis and pair of axes trains as on one rank: losses, norms and weights."""

from __future__ import annotations

from typing import Any

import pytest

import tests.ranks
from tests.parallel import models
from tests.parallel.comparing import check, compare
from tests.parallel.meshes import DEALT, EIGHT, FAMILIES, FOUR, SCHEDULES, TWO, fits

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_one_with_dropout_on(ranks: Any, family: str) -> None:
    names = [name for name in TWO if fits(family, TWO[name])]
    if family not in ("gpt2", "t5"):  # one block list with tied embeddings, and two block lists
        names = [name for name in names if name not in ("gpipe", "zero_bubble")]
    check(ranks(2, compare, family, [TWO[name] for name in names], {}))


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family not in FAMILIES])
def test_other_families_are_cut_over_a_tensor_axis(ranks: Any, family: str) -> None:
    check(ranks(2, compare, family, [TWO["tensor"], TWO["tensor, sequence"]], {}, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_train_as_one(ranks: Any, family: str) -> None:
    check(ranks(4, compare, family, [FOUR[name] for name in DEALT[family]], {}, 3))


def test_data_tensor_and_pipeline_over_eight_ranks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.ranks, "MAX_RANKS", 8)
    check(ranks(8, compare, "llama", [EIGHT["data, tensor, pipeline"]], {}, 2))


def test_every_mesh_is_some_familys() -> None:
    assert {name for names in DEALT.values() for name in names} == set(FOUR)
    assert set(DEALT) == set(FAMILIES)
    assert {plan["schedule"] for plan in TWO.values() if "schedule" in plan} == set(SCHEDULES)
