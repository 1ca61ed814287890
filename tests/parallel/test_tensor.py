"""Tensor parallelism: a model cut over ranks trains as the whole model does on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import unbounded
from tests.parallel import models
from tests.parallel.comparing import compare, optimizer_of

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def check(results: list[list[Any]]) -> None:
    for per_rank in results:
        for expected, found, worst in per_rank:
            assert found == pytest.approx(expected, rel=1e-5)
            assert worst[0] < 1e-4, worst


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_model_over_two_ranks_trains_as_on_one(ranks: Any, family: str) -> None:
    plans = [{"tensor": 2}, {"tensor": 2, "sequence": True}]
    check(ranks(2, compare, family, plans, {}))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_over_four_ranks_trains_as_on_one(ranks: Any, family: str) -> None:
    plans: list[dict[str, Any]] = [
        {"tensor": 4},  # llama: two key heads, each on two ranks
        {"tensor": 4, "sequence": True, "activations": "recompute"},
        {"tensor": 2, "sequence": True, "optimizer": "host", "weights": "host"},
        {"tensor": 2, "stage": 1, "optimizer": "disk", "gradients": "disk"},
    ]
    check(ranks(4, compare, family, plans, {}))


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts the collectives of the tensor axis inside."""
    from unbounded.ranks import axis

    names = {"all_reduce": dist, "_gather": axis, "all_to_all_single": dist}  # a scattered sum is an exchange on a CPU
    plain = {name: getattr(home, name) for name, home in names.items()}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain[name](*args, **kwargs)

        return call

    for name, home in names.items():
        setattr(home, name, wrap(name))
    try:
        yield
    finally:
        for name, home in names.items():
            setattr(home, name, plain[name])


def count_collectives(rank: int, size: int, family: str, sequence: bool) -> list[Any]:
    found = []
    for depth in (1, 3):
        model = models.build(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": depth})
        model, _ = unbounded.shard(model, optimizer_of(model), {"tensor": 2, "sequence": sequence})
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        with counted(forward):
            loss = model(**models.batch(family, 0)).loss
        with counted(backward):
            loss.backward()
        found.append((forward, backward))
    (low_f, low_b), (high_f, high_b) = found
    return [{name: (high[name] - low[name]) / 2 for name in high} for low, high in ((low_f, high_f), (low_b, high_b))]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_block_has_two_all_reduces_forward_and_two_backward(ranks: Any, family: str) -> None:
    for forward, backward in ranks(2, count_collectives, family, False):
        assert {name: count for name, count in forward.items() if count} == {"all_reduce": 2}
        assert {name: count for name, count in backward.items() if count} == {"all_reduce": 2}


def test_with_sequence_parallelism_each_is_split_in_two(ranks: Any) -> None:
    for forward, backward in ranks(2, count_collectives, "llama", True):
        assert forward == {"_gather": 2, "all_to_all_single": 2, "all_reduce": 0}
        assert backward == {"_gather": 2, "all_to_all_single": 2, "all_reduce": 1}  # 1: the block's norms
