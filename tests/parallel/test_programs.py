"""Some of the random programs over the parallel axes, and some that they have found.

`python -m tests.parallel.programs` runs more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.programs import check, draw_program

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
MODEL = {
    "kind": "mine",
    "heads": 4,
    "width": 12,
    "inner": 20,
    "depth": 4,
    "vocabulary": 23,
    "dropout": 0.0,
    "list": "list",
    "tied": False,
    "bias": True,
    "head_bias": True,
    "gain": True,
    "never": False,
    "fused": True,
    "affine": True,
}
STEP = {
    "backwards": 1,
    "rows": 4,
    "length": 8,
    "no_sync": False,
    "last": False,
    "clip": None,
    "torch": False,
    "gradients": True,
    "half": False,
    "padded": False,
    "between": [],
}
STYLES = (("blocks.*.qkv", "column_of_3"), ("blocks.*.out", "row"), ("blocks.*.up", "column"), ("blocks.*.down", "row"))
PIPELINE = {"pipeline": 2, "microbatches": 2}


def make(size: int, plan: dict[str, Any], *between: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "size": size,
        "model": {**MODEL, **changes},
        "plans": [plan] * 3,
        "optimizer": "groups",
        "scheduler": None,
        "steps": [{**STEP, "between": ops} for ops in between],
    }


PROGRAMS = {
    "what a stage sends back changes with what is frozen": make(
        2, {**PIPELINE, "stage": 0}, ["freeze", "freeze first"], ["thaw"], []
    ),
    "a stage that trains nothing": make(2, PIPELINE, ["hop"], [], frozen=["words", "places", ".0.", ".1.", "norm"]),
    "unused parameters over a context": make(2, {"context": 2}, [], [], never=True),
    "unused parameters of parts of a sequence": make(
        2, {"tensor": 2, "sequence": True, "styles": STYLES}, [], [], never=True
    ),
    "styles and a context": make(4, {"tensor": 2, "context": 2, "styles": STYLES}, [], []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_train_as_in_plain_pytorch(ranks: Any, name: str) -> None:
    assert check(PROGRAMS[name], ranks) == ("same", "")


@pytest.mark.parametrize("seed", [2, 4])
def test_random_programs_train_as_in_plain_pytorch(ranks: Any, seed: int) -> None:
    assert check(draw_program(seed), ranks) == ("same", "")
