"""Several processes on one GPU train as one does: gloo over CUDA tensors, and stages that send through the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.comparing import check, compare
from tests.parallel.meshes import FOUR, TWO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEPS, TOLERANCE = 3, 1e-4  # products of other shapes are added up in a different order


def test_two_processes_train_as_one(ranks: Any) -> None:
    plans = [*TWO.values(), {"tensor": 2, "weights": "host", "optimizer": "host", "activations": "recompute"}]
    results = ranks(2, compare, "gpt2", plans, WITHOUT_DROPOUT, STEPS, "cuda")
    check(results, TOLERANCE)


def test_stages_drop_what_one_process_drops(ranks: Any) -> None:
    plans = [TWO["1f1b"], TWO["interleaved"]]
    check(ranks(2, compare, "gpt2", plans, {}, STEPS, "cuda"), TOLERANCE)


def test_pairs_of_axes_over_four_processes_train_as_one(ranks: Any) -> None:
    plans = [FOUR[name] for name in ("tensor, pipeline", "data, context", "data, tensor")]
    check(ranks(4, compare, "llama", plans, {"attention_dropout": 0.0}, STEPS, "cuda"), TOLERANCE)
