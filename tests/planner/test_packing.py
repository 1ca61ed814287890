"""`unbounded.plan` packs frozen weights where that is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbounded.planner.evaluation import Candidate, Request, evaluate
from unbounded.planner.models.footprint import STATE_BYTES, Footprint, footprint_of
from unbounded.planner.models.shapes import make_shape
from unbounded.planner.plan import Plan
from unbounded.planner.presets import read_machine
from unbounded.planner.step.loads import Setup

STATES = STATE_BYTES["bf16", "exact"]


def frozen() -> Footprint:
    whole = footprint_of(make_shape(layers=32, hidden=2048))
    return replace(whole, parts=tuple(replace(part, trained_numel=0) for part in whole.parts))


def predict(tokens: int, **fields: bool) -> Candidate | None:
    plan = Plan(weights="host", host_bytes=16 * 2**30, activations="recompute", **fields)
    request = Request(tokens, 1024, plan=plan, formats={"exact": STATES})
    setup = Setup(tokens=tokens, sequence=1024, stage=3)
    return evaluate(frozen(), read_machine("rtx4090"), setup, "exact", request)


@pytest.mark.parametrize(("tokens", "packs"), [(1024, True), (16_384, False)])
def test_weights_are_packed_where_the_link_sets_the_pace(tokens: int, packs: bool) -> None:
    ways = {fields: predict(tokens, pack_frozen=fields) for fields in (True, False)}
    chosen = predict(tokens)
    assert chosen is not None
    assert chosen.packs == packs
    assert chosen.seconds == min(way.seconds for way in ways.values() if way is not None)
