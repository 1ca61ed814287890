"""The search over axes, placements and policies: what it picks, what it keeps of a plan, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from unbounded.errors import BudgetError, PlanError
from unbounded.planner.evaluation import POLICIES, Request, evaluate, rooms
from unbounded.planner.explanation import describe
from unbounded.planner.models.configs import read_model
from unbounded.planner.models.footprint import STATE_BYTES, Footprint, footprint_of
from unbounded.planner.plan import TIERS, Plan
from unbounded.planner.presets import find_machine
from unbounded.planner.search import compare_ways, search
from unbounded.planner.step.loads import LANES, PHASES, Setup, place_loads
from unbounded.planner.step.prediction import compare
from unbounded.planner.unit_bytes import UnitBytes, UnitPlace


def model(text: str) -> Footprint:
    return footprint_of(read_model(text))


def test_what_fits_a_device_is_on_it_and_keeps_its_activations() -> None:
    found = search(model("llama-1b"), find_machine("h200"), Request(8192))
    assert {where for _, where in found.places} == {UnitPlace("device", "device", "device")}
    assert {policy for _, policy in found.policies} == {"keep"}
    assert found.prediction.bottleneck == "compute"
    assert not found.prediction.held["host"]


@pytest.mark.parametrize(
    ("text", "machine", "tokens"),
    [
        ("llama-7b", "rtx4090", 8192),
        ("llama-70b", "h200:8", 65536),
        ("gpt-1t", "dgx2", 16 * 2048),
        ("llama-22b", "h200", 2048),
    ],
)
def test_what_is_held_is_within_the_machine(text: str, machine: str, tokens: int) -> None:
    found = search(model(text), find_machine(machine), Request(tokens))
    room = rooms(find_machine(machine), Plan(), found.prediction.num_devices)
    for tier in TIERS:
        assert found.prediction.tier_bytes(tier) <= room[tier] * (1 + 1e-9), tier
    assert found.prediction.seconds > 0
    assert found.prediction.without_bottleneck() < found.prediction.seconds


def test_on_a_small_model_no_other_placement_and_policy_is_faster() -> None:
    """Every placement of all units alike, with every policy: none beats the one that was found."""
    footprint = model("layers=2,hidden=512,vocabulary=1000")
    machine = replace(find_machine("rtx4090"), device_bytes=120 * 2**20, host_bytes=2**32)
    request = Request(4096, 512)
    best = search(footprint, machine, request)
    for weights, optimizer, policy in itertools.product(TIERS, TIERS, POLICIES):
        fixed = replace(request, plan=Plan(weights=weights, optimizer=optimizer, activations=policy))
        for rows in (1, 2, 4, 8):
            setup = Setup(tokens=512 * rows, sequence=512, accumulate=8 // rows)
            other = evaluate(footprint, machine, setup, "exact", fixed)
            if other is not None:
                assert other.seconds >= best.seconds * 0.98, (weights, optimizer, policy, rows)


def test_a_search_gives_the_same_twice() -> None:
    first, second = (search(model("llama-7b"), find_machine("rtx4090"), Request(8192)) for _ in range(2))
    assert first.places == second.places
    assert first.policies == second.policies


def test_more_memory_is_never_slower_and_more_tokens_never_cheaper() -> None:
    small, machine = model("llama-7b"), find_machine("rtx4090")
    times = [
        search(small, replace(machine, device_bytes=size * 2**30), Request(8192)).seconds for size in (16, 24, 48, 141)
    ]
    assert times == sorted(times, reverse=True)
    steps = [search(small, machine, Request(tokens)).seconds for tokens in (2048, 8192, 32768)]
    assert steps == sorted(steps)


def test_what_a_plan_fixes_is_kept() -> None:
    plan = Plan(optimizer="disk", activations="recompute", host_bytes="64GiB")
    found = search(model("llama-1b"), find_machine("h200"), Request(8192, plan=plan))
    assert {where.optimizer for _, where in found.places} == {"disk"}
    assert {policy for _, policy in found.policies} == {"recompute"}
    assert found.prediction.bottleneck.startswith("disk")


def test_a_trillion_parameters_on_3072_gpus_are_split_over_all_axes() -> None:
    request = Request(2048 * 3072, stages=(1, 2, 3))
    found = search(model("gpt-1t"), find_machine("dgx-a100:384"), request)
    setup = found.setup
    assert setup.data * setup.tensor * setup.pipeline == 3072
    assert setup.tensor <= 8
    assert found.prediction.tier_bytes("device") <= 0.9 * 80e9


def test_below_stage_three_weights_stay_on_the_device() -> None:
    footprint, machine = model("llama-7b"), find_machine("h200:2")
    for stage in (0, 1, 2):
        found = search(footprint, machine, Request(8192, stages=(stage,), tensors=(1,), pipelines=(1,)))
        assert {where.weights for _, where in found.places} == {"device"}
        with pytest.raises(PlanError, match=f"stage {stage} keeps whole weights on every device"):
            Plan(stage=stage, weights=(("layers.0", "device"), ("*", "disk")))
    tight = Request(8192, stages=(1, 2), tensors=(1,), pipelines=(1,), plan=Plan(device_bytes="12GiB"))
    with pytest.raises(BudgetError):  # 12.6 GiB of weights
        search(footprint, machine, tight)
    off = Request(8192, stages=(1, 2, 3), plan=Plan(weights="host"))
    assert search(footprint, machine, off).setup.stage == 3


def test_compact_states_are_taken_only_where_they_are_allowed_and_faster() -> None:
    formats = {name: STATE_BYTES["bf16", name] for name in ("exact", "compact")}
    footprint, machine = model("llama-7b"), find_machine("rtx4090")
    exact = search(footprint, machine, Request(8192))
    both = search(footprint, machine, Request(8192, formats=formats))
    assert exact.format == "exact"
    assert both.format == "compact"
    assert both.seconds < exact.seconds


def test_alternatives_are_ranked_and_the_best_is_among_them() -> None:
    footprint, machine = model("llama-7b"), find_machine("h200:8")
    request = Request(65536, stages=(1, 2, 3))
    ways = compare_ways(footprint, machine, request)
    assert [way.cost for way in ways] == sorted(way.cost for way in ways)
    assert ways[0].seconds == pytest.approx(search(footprint, machine, request).seconds, rel=0.01)
    assert len({(way.setup.stage, way.setup.tensor, way.setup.pipeline) for way in ways}) == len(ways)


def test_a_model_that_fits_nowhere_says_what_is_short_and_what_would_fit() -> None:
    with pytest.raises(BudgetError, match=r"fits nowhere: running one unit .* of device memory, but there are"):
        search(model("llama-405b"), find_machine("laptop"), Request(2048))
    tiny = Plan(host_bytes="8GiB", disk_bytes="8GiB")
    told = r"its states take .* would fit on \d+ such devices. Here fit [\d.]+B .* at 14 bytes each"
    with pytest.raises(BudgetError, match=told):
        search(model("llama-7b"), find_machine("rtx4090"), Request(2048, plan=tiny))


def test_without_stored_gradients_a_model_of_seven_sixths_the_size_fits() -> None:
    box = {"device_bytes": "24GiB", "host_bytes": "44GiB", "disk_bytes": "16GiB"}
    footprint, machine = model("llama-7b"), find_machine("h200")
    with pytest.raises(BudgetError, match=r'gradients="none": [\d.]+B parameters at 12 bytes each'):
        search(footprint, machine, Request(2048, plan=Plan(**box)))
    found = search(footprint, machine, Request(2048, plan=Plan(**box, gradients="none")))
    held = found.prediction.held
    states = sum(held[tier].get(kind, 0) for tier in held for kind in ("weights", "optimizer"))
    assert states == 12 * footprint.numel
    assert not any("gradients" in kinds for kinds in held.values())
    assert "largest      " in "\n".join(describe(found))
    assert found.capacity is not None
    ratio = found.capacity.most(keeps_gradients=False) / found.capacity.most(keeps_gradients=True)
    assert ratio == pytest.approx(14 / 12)
    # The update is work of the backward, and a step has one.
    assert found.setup.accumulate == 1
    passes = [found.prediction.lane(phase, "host memory") for phase in ("forward", "first forward", "backward")]
    assert passes[0] == passes[1] < passes[2]


def test_several_backwards_add_on_the_host_beside_what_passes_through_its_memory() -> None:
    machine = replace(find_machine("h200"), host_bandwidth=100e9, host_add_rate=50e9)
    unit = UnitBytes("block", weights=20, gradients=20, optimizer=100, summed_gradients=40)
    for times, expected in ((1, (20 + 20) / 100e9), (4, (20 + 20) / 100e9 + (20 + 5 * 40 / 4) / 50e9)):
        loads = place_loads(unit, UnitPlace("host", "host", "host"), machine, Setup(accumulate=times))
        found = loads.seconds[PHASES.index("backward") * len(LANES) + LANES.index("host memory")]
        assert found == pytest.approx(expected)


def test_tokens_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(PlanError, match=r"not a whole number of sequences"):
        search(model("llama-1b"), find_machine("h200:8"), Request(3 * 2048, tensors=(1,), pipelines=(1,)))
    with pytest.raises(PlanError, match=r"tokens is 0, but it must be at least 1"):
        search(model("llama-1b"), find_machine("h200"), Request(0))


def test_a_run_is_compared_with_its_prediction_in_one_line() -> None:
    assert compare(2.31, 2.26) == "predicted 2.31 s, measured 2.26 s"
    assert compare(0.0231, 0.0226) == "predicted 23.1 ms, measured 22.6 ms"
