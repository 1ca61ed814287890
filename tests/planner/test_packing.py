"""`unbounded.plan` packs frozen weights where that is predicted to be faster, and counts on it for how large a model
may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbounded.planner.evaluation import Candidate, Request, evaluate
from unbounded.planner.models.capacity import Capacity
from unbounded.planner.models.footprint import STATE_BYTES, Footprint, footprint_of
from unbounded.planner.models.shapes import make_shape
from unbounded.planner.plan import Plan
from unbounded.planner.presets import read_machine
from unbounded.planner.step.loads import Setup

STATES = STATE_BYTES["bf16", "exact"]


def frozen() -> Footprint:
    whole = replace(footprint_of(make_shape(layers=32, hidden=2048)), states=STATES)
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


@pytest.mark.parametrize("device_bytes", [0, 1e9, 3e10, 1e12])
@pytest.mark.parametrize("trained", [0, 0.02, 0.5, 1])
def test_the_largest_model_fills_what_there_is(trained: float, device_bytes: float) -> None:
    """It is the one whose states, frozen weights outside the device packed, take exactly what is left for them."""
    whole = replace(footprint_of(make_shape(layers=32, hidden=2048)), states=STATES)
    parts = tuple(replace(part, trained_numel=int(part.numel * trained)) for part in whole.parts)
    capacity = Capacity(replace(whole, parts=parts), device_bytes, 1e11, packs=True)
    most = capacity.most(keeps_gradients=True)
    times = most / whole.numel
    larger = [replace(p, numel=int(p.numel * times), trained_numel=int(p.trained_numel * times)) for p in parts]
    states = replace(capacity, footprint=replace(whole, parts=tuple(larger))).states_bytes(keeps_gradients=True)
    assert states == pytest.approx(capacity.left_bytes, rel=1e-6)
    loose = replace(capacity, packs=False).most(keeps_gradients=True)
    assert most == pytest.approx(loose) if trained == 1 else most > loose


def test_all_of_a_frozen_model_outside_the_device_is_packed() -> None:
    capacity = Capacity(frozen(), 0.0, 1e11, packs=True)
    assert capacity.most(keeps_gradients=True) == pytest.approx(1e11 * 8 / 12.25)
    assert capacity.describe().endswith("B parameters at 1.53 bytes each")
