"""What the search leaves out cannot win: with and without bounds it answers the same, and however it
groups parts, a prediction is their sum."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from unbounded.errors import BudgetError
from unbounded.planner import evaluation
from unbounded.planner import search as searching
from unbounded.planner.evaluation import Candidate, Request
from unbounded.planner.linear.program import Program, Solution, solve_program
from unbounded.planner.machine import MachineRates
from unbounded.planner.models.configs import read_model
from unbounded.planner.models.footprint import STATE_BYTES, Footprint, expand, footprint_of
from unbounded.planner.plan import Plan
from unbounded.planner.presets import find_machine
from unbounded.planner.step.loads import activation_loads, base_loads, place_loads, unit_bytes

FORMATS = {name: STATE_BYTES["bf16", name] for name in ("exact", "compact")}


def random_case(rng: random.Random) -> tuple[Footprint, MachineRates, Request]:
    """A model of a few or many blocks on a machine that holds about so much, and what is asked for."""
    layers, hidden = rng.choice((1, 2, 3, 4, 6, 8, 24, 60)), rng.choice((128, 512, 1024))
    footprint = footprint_of(read_model(f"layers={layers},hidden={hidden},vocabulary={rng.choice((1000, 32000))}"))
    bytes_of_states = 14 * footprint.numel
    machine = replace(
        find_machine(rng.choice(("rtx4090", "dgx2:2", "h100:16"))),
        device_bytes=int(bytes_of_states * rng.choice((0.3, 0.6, 1.5)) + 2**28),
        host_bytes=int(bytes_of_states * rng.choice((0.2, 0.5, 2)) + 2**31),
        disk_both=rng.choice((0.5e9, 5e9, 50e9)),
        host_threads=rng.choice((2, 16)),
    )
    machine = replace(machine, devices=rng.choice((1, 2, 4)), nodes=rng.choice((1, 2)) if machine.nodes > 1 else 1)
    request = Request(
        256 * machine.num_devices * rng.choice((1, 2, 4)),
        256,
        plan=Plan(**rng.choice(({}, {}, {"weights": "host"}, {"optimizer": "host"}, {"gradients": "none"}))),
        formats=FORMATS if rng.random() < 0.3 else {"exact": FORMATS["exact"]},
        stages=rng.choice(((3,), (1, 2, 3))),
        buffer_bytes=2**27,
    )
    return footprint, machine, request


def answers(case: tuple[Footprint, MachineRates, Request]) -> tuple[Candidate | str, list[Candidate]]:
    """What is chosen or refused, and the alternatives."""
    try:
        chosen: Candidate | str = searching.search(*case)
    except BudgetError as refused:
        chosen = str(refused)
    return chosen, searching.compare_ways(*case, limit=4)


def test_pruned_and_unpruned_searches_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    cases = [random_case(rng) for _ in range(20)]
    pruned = [answers(case) for case in cases]
    find_ways, solved = searching._ways, []

    def without_bounds(*args: Any) -> list[tuple[float, Any, str]]:
        return [(0.0, setup, state_format) for _, setup, state_format in find_ways(*args)]

    def without_cutoff(program: Program, cutoff: float, max_nodes: int) -> Solution | None:
        solved.append(program)
        return solve_program(program, max_nodes=max_nodes)

    monkeypatch.setattr(searching, "_ways", without_bounds)
    monkeypatch.setattr(evaluation, "solve_program", without_cutoff)
    for case, expected in zip(cases, pruned, strict=True):
        assert answers(case) == expected
    assert sum(isinstance(chosen, Candidate) for chosen, _ in pruned) > 15
    assert len(solved) > 500


def mix(footprint: Footprint) -> Footprint:
    """As many blocks again, which have the same bytes but cost three times as much to compute and to keep."""
    block = next(part for part in footprint.parts if part.is_block)
    cost = replace(block.cost, products=3 * block.cost.products, kept=3 * block.cost.kept)
    return replace(footprint, parts=(*footprint.parts, replace(block, name="wide", cost=cost)))


def lanes_part_by_part(found: Candidate) -> list[float]:
    setup, machine = found.setup, found.prediction.machine
    parts, policies = {part.name: part for part in expand(found.footprint.parts)}, dict(found.policies)
    lanes = base_loads(found.footprint, machine, setup).seconds
    for name, where in found.places:
        added = [place_loads(unit_bytes(parts[name], found.footprint, setup), where, machine, setup).seconds]
        if name in policies:
            added.append(activation_loads(parts[name], policies[name], machine, setup)[0].seconds)
        lanes = [sum(seconds) for seconds in zip(lanes, *added, strict=True)]
    return lanes


def test_a_prediction_is_the_sum_of_its_parts_however_they_are_grouped() -> None:
    rng = random.Random(5)
    for number in range(16):
        footprint, machine, request = random_case(rng)
        footprint = mix(footprint)
        listed = replace(footprint, parts=expand(footprint.parts))
        request = replace(request, updates_in_parts=False)  # which is decided for the whole step
        if number % 2:
            plan = Plan(optimizer=(("*.0", "host"), ("*.1", "disk")), activations=(("wide.*", "recompute"),))
            request = replace(request, plan=plan)
        chosen, other = answers((footprint, machine, request))[0], answers((listed, machine, request))[0]
        if isinstance(chosen, str) or isinstance(other, str):
            assert chosen == other
            continue
        assert other.cost == pytest.approx(chosen.cost, rel=1e-3)  # last digits may choose between equals
        for found in (chosen, other):
            assert list(found.prediction.lanes) == pytest.approx(lanes_part_by_part(found), rel=1e-9)
