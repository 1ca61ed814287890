"""The pure functions that decide what lives where, and which host states the GPU updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from unbounded.errors import BudgetError, PlanError
from unbounded.optim.book import RuleBook
from unbounded.planner.machine import MachineRates
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.solve import Shortage, solve
from unbounded.planner.step.loads import LANES, PHASES, Setup, place_loads
from unbounded.planner.step.streaming import choose_streamed, streamed_part
from unbounded.planner.unit_bytes import Budget, UnitBytes, UnitPlace, check_patterns, read_placement
from unbounded.zero.setup.blueprint import Blueprint, Means, draw
from unbounded.zero.setup.sites import find_sites
from unbounded.zero.setup.specs import UnitSpec, find_specs
from unbounded.zero.step.early.in_backward import InBackward

MIB = 2**20
# bf16 with `exact` states, 1 Mi parameters: 2 + 2 + 8 + 2 = 14 MiB, and fp32 gradients where the disk keeps them.
UNITS = [
    UnitBytes(f"blocks.{i}", 2 * MIB, 2 * MIB, 8 * MIB, remainder=2 * MIB, summed_gradients=4 * MIB) for i in "0123"
]
WHOLE = 14 * MIB
DEVICE, HOST = UnitPlace("device", "device", "device"), UnitPlace("host", "host", "host")
LIGHT_ON_HOST, DISK = UnitPlace("host", "host", "disk"), UnitPlace("disk", "disk", "disk")


def budget(device: int, host: int, disk: int = 2**40, *, device_reserve: int = 0, host_reserve: int = 0) -> Budget:
    return Budget(device, host, disk, device_reserve, host_reserve)


def place(units: list[UnitBytes], room: Budget, plan: Plan) -> tuple[UnitPlace, ...]:
    solved = solve(units, room, plan, UNMEASURED)
    if isinstance(solved, Shortage):
        raise solved.error()
    return solved.places


def test_what_fits_the_device_stays_on_the_device() -> None:
    assert place(UNITS, budget(4 * WHOLE, 0, 0), Plan()) == (DEVICE,) * 4


def test_the_first_units_are_whole_on_the_device_then_the_host_takes_units_then_the_disk_optimizer_states() -> None:
    host = WHOLE + 2 * 6 * MIB  # one whole unit, and the light parts of the two others
    assert place(UNITS, budget(WHOLE, host), Plan()) == (DEVICE, HOST, LIGHT_ON_HOST, LIGHT_ON_HOST)


def test_the_host_takes_the_light_kinds_of_every_unit_before_the_optimizer_states_of_any() -> None:
    one_short = WHOLE + 2 * 6 * MIB - 1
    assert place(UNITS, budget(WHOLE, one_short), Plan()) == (DEVICE, *(LIGHT_ON_HOST,) * 3)


def test_without_room_on_device_and_host_all_is_on_disk() -> None:
    assert place(UNITS, budget(0, 0), Plan()) == (DISK,) * 4


def test_weights_on_disk_are_spread_over_the_model_except_its_end() -> None:
    frozen = [UnitBytes(f"blocks.{index}", 2 * MIB, 0, 0) for index in range(12)]
    tiers = [where.weights for where in place(frozen, budget(4 * MIB, 14 * MIB), Plan())]
    assert [tier for tier in tiers if tier != "disk"] == ["device"] * 2 + ["host"] * 7
    assert [index for index, tier in enumerate(tiers) if tier == "disk"] == [1, 5, 8]


def test_frozen_weights_are_packed_before_any_goes_to_disk() -> None:
    frozen = [UnitBytes(f"blocks.{index}", 4 * MIB, 0, 0, packed=3 * MIB) for index in range(8)]
    gpu, cpu = UNMEASURED, replace(UNMEASURED, is_cpu=True)

    def tiers(host: int, machine: MachineRates = gpu, **fields: Any) -> tuple[bool, list[str]]:
        solved = solve(frozen, budget(8 * MIB, host), Plan(**fields), machine)
        assert not isinstance(solved, Shortage)
        return solved.packs, [where.weights for where in solved.places]

    assert tiers(24 * MIB) == (False, ["device"] * 2 + ["host"] * 6)
    assert tiers(24 * MIB - 1) == (True, ["device"] * 2 + ["host"] * 6)
    assert tiers(18 * MIB) == (True, ["device"] * 2 + ["host"] * 6)
    assert tiers(18 * MIB - 1)[1].count("disk") == 1
    assert tiers(24 * MIB, pack_frozen=True)[0]
    packs, places = tiers(18 * MIB, pack_frozen=False)
    assert (packs, places.count("disk")) == (False, 2)
    packs, places = tiers(18 * MIB, cpu)
    assert (packs, places.count("disk")) == (False, 2)
    assert tiers(18 * MIB, cpu, pack_frozen=True)[0]


def test_packed_weights_take_less_of_links_and_disk_and_some_computation() -> None:
    unit = UnitBytes("block", 4 * MIB, 0, 0, packed=3 * MIB)
    where, setup = UnitPlace("disk", "disk", "disk"), Setup()
    slots = [(phase, lane) for phase in PHASES for lane in LANES]
    plain, packed = (
        dict(zip(slots, place_loads(replace(unit, is_packed=packs), where, UNMEASURED, setup).seconds, strict=True))
        for packs in (False, True)
    )
    for phase in ("forward", "backward"):
        for lane in ("to device", "disk read"):
            assert packed[phase, lane] == pytest.approx(0.75 * plain[phase, lane])
        assert plain[phase, "compute"] == 0
        assert packed[phase, "compute"] == pytest.approx(7 * MIB / UNMEASURED.device_bandwidth)


def test_reserves_are_not_given_to_states() -> None:
    assert place(UNITS, budget(4 * WHOLE, 4 * WHOLE, device_reserve=4 * WHOLE), Plan()) == (HOST,) * 4
    assert place(UNITS, budget(0, 4 * WHOLE, host_reserve=4 * WHOLE), Plan()) == (DISK,) * 4


def test_one_byte_less_of_the_device_moves_one_unit() -> None:
    places = place(UNITS, budget(4 * WHOLE - 1, 4 * WHOLE), Plan())
    assert places == (DEVICE, DEVICE, DEVICE, HOST)


def test_placements_of_the_plan_are_kept_whatever_fits() -> None:
    plan = Plan(weights="disk", gradients="host", optimizer="device")
    assert place(UNITS, budget(2**40, 2**40), plan) == (UnitPlace("disk", "host", "device"),) * 4


def test_gradients_follow_a_fixed_optimizer_but_not_to_disk() -> None:
    huge = budget(2**40, 2**40)
    assert {where.gradients for where in place(UNITS, huge, Plan(optimizer="host"))} == {"host"}
    assert {where.gradients for where in place(UNITS, huge, Plan(optimizer="disk"))} == {"host"}


def test_gradients_that_wait_for_their_reduction_are_on_the_device_wherever_they_go_then() -> None:
    units = [replace(unit, deferred=2 * MIB) for unit in UNITS]
    plan = Plan(stage=1, gradients="host", optimizer="host")
    place(units, budget(16 * MIB, 2**40), plan)
    with pytest.raises(BudgetError, match="device is short by"):
        place(units, budget(16 * MIB - 1, 2**40), plan)


def test_below_stage_three_weights_are_on_the_device() -> None:
    for where in place(UNITS, budget(16 * MIB, 0), Plan(stage=2)):  # 2 bytes per parameter, and 2 that complete it
        assert (where.weights, where.optimizer) == ("device", "disk")


def test_what_completes_the_weights_is_with_the_optimizer_unless_that_is_on_disk() -> None:
    assert UnitPlace("device", "host", "host").remainder == "host"
    assert UnitPlace("host", "host", "disk").remainder == "host"


@pytest.mark.parametrize("weights", ["device", "disk"])
def test_what_completes_the_weights_counts_where_it_lives_before_a_tier_is_full(weights: str) -> None:
    gradients, states = 4 * 2 * MIB, (8 + 2) * MIB
    plan, device = Plan(weights=weights, gradients="host"), 16 * MIB if weights == "device" else 0
    places = place(UNITS, budget(device, gradients + 2 * states - 1), plan)
    assert [where.optimizer for where in places] == ["host", "disk", "disk", "disk"]
    places = place(UNITS, budget(device, gradients + 2 * states), plan)
    assert [where.optimizer for where in places] == ["host", "host", "disk", "disk"]


def test_patterns_place_the_units_they_match_and_the_first_match_counts() -> None:
    plan = Plan(optimizer=(("blocks.0", "disk"), ("blocks.[12]", "host"), ("blocks.2", "disk")))
    places = place(UNITS, budget(2**40, 2**40), plan)
    assert [where.optimizer for where in places] == ["disk", "host", "host", "device"]  # the last one is left open
    assert read_placement(plan.optimizer, "head") is None


def test_a_pattern_for_a_module_is_for_all_of_its_units() -> None:
    placement = (("blocks.0", "device"), ("blocks.1[bfloat16, Muon]", "disk"), ("blocks.[12]", "host"))
    check_patterns(placement, "optimizer", ["blocks.0[bfloat16, Muon]", "blocks.1[bfloat16, Muon]", "blocks.2"])
    assert read_placement(placement, "blocks.0[bfloat16, Muon]") == "device"
    assert read_placement(placement, "blocks.1[bfloat16, Muon]") == "disk"
    assert read_placement(placement, "blocks.1[bfloat16, AdamW]") == "host"
    assert read_placement(placement, "blocks.2") == "host"


def test_the_label_of_a_unit_is_no_set_of_characters() -> None:
    names = [f"blocks.{index}[bfloat16{more}]" for index in range(30) for more in ("", ", frozen")]
    names += [f"head{index}.weight[{rows}]" for index in ("", 1) for rows in ("0:128", "128:256")]
    closed = tuple((name, "device" if index % 3 else "host") for index, name in enumerate(names))
    assert [(name, read_placement(closed, name)) for name in names] == list(closed)
    some = (("blocks.1[bfloat16]", "disk"), ("blocks.*[bfloat16, frozen]", "host"), ("*", "device"))
    assert [name for name in names if read_placement(some, name) == "disk"] == ["blocks.1[bfloat16]"]
    assert all((read_placement(some, name) == "host") == name.endswith("frozen]") for name in names)


def test_a_pattern_that_matches_no_unit_is_an_error() -> None:
    names = [unit.name for unit in UNITS]
    check_patterns((("blocks.*", "disk"),), "optimizer", names)
    with pytest.raises(PlanError, match=r"the pattern 'block\.\*' in optimizer matches no unit. The units are blocks"):
        check_patterns((("block.*", "disk"),), "optimizer", names)


def test_too_little_of_everything_says_which_tier_by_how_much_and_what_would_fit() -> None:
    need = 4 * (2 + 4 + 8 + 2) * MIB  # on disk gradients are kept in fp32
    with pytest.raises(BudgetError) as caught:
        place(UNITS, budget(0, 0, need - 3 * MIB), Plan())
    assert str(caught.value) == (
        "the states take 56.0 MiB on this rank and do not fit: disk is short by 3.0 MiB of its 61.0 MiB. "
        "Raise a budget by 3.0 MiB (disk_bytes with disk_path on a larger disk is the cheapest), use more ranks, or "
        'optimizer_format="compact". Without clipping and with one backward per step, '
        'gradients="none" takes 8.0 MiB less.'
    )
    assert place(UNITS, budget(0, 0, need), Plan()) == (DISK,) * 4  # it fits with what was asked for


def test_a_fixed_tier_that_is_short_while_others_have_room_says_so() -> None:
    with pytest.raises(BudgetError) as caught:
        place(UNITS, budget(WHOLE, 2**40), Plan(weights="device", gradients="device", optimizer="device"))
    text = str(caught.value)
    assert "device is short by 42.0 MiB of its 14.0 MiB" in text
    assert 'leave the placement to plan="auto"' in text
    assert "host is short" not in text


def test_rooms_that_are_enough_only_together_say_so() -> None:
    """What is left of each tier is smaller than anything that a unit puts there."""
    with pytest.raises(BudgetError, match=r"have 4.0 MiB left, but not in one piece .* Raise a budget by 1 B"):
        place(UNITS, budget(2 * MIB - 1, 2 * MIB - 1, 4 * (2 + 4 + 8 + 2) * MIB - 1), Plan())


def test_the_part_to_stream_falls_with_the_number_of_threads_and_ends_at_none() -> None:
    parts = [streamed_part(replace(UNMEASURED, host_threads=threads)) for threads in range(1, 33)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] == pytest.approx(3.0 / 3.35)  # one thread: the link adds 3 Gparam/s to its 0.35
    assert parts[-1] == 0.0  # the host's kernel uses all of the memory's bandwidth
    assert all(part == 0.0 or part >= 0.1 for part in parts)


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_streamed_part_is_spread_evenly_over_the_candidates(part: float) -> None:
    chosen = choose_streamed([True] * 40, part)
    assert sum(chosen) == 40 * part
    for end in range(1, 41):
        assert abs(sum(chosen[:end]) - end * part) < 1  # neither side is ahead anywhere in the model


def test_only_candidates_are_streamed() -> None:
    assert choose_streamed([False, True, False, True], 1.0) == [False, True, False, True]
    assert choose_streamed([False, False], 1.0) == [False, False]


def four_layers() -> list[UnitSpec]:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    groups = {id(parameter): 0 for parameter in model.parameters()}
    return find_specs(find_sites(model), groups, 1, None, book=RuleBook(optimizer, "exact"))


def test_beside_a_gpu_units_are_updated_early_in_most_of_the_hosts_spare_memory() -> None:
    specs, unit, seen = four_layers(), 4096 * 4096, set()
    machine = replace(UNMEASURED, host_threads=32)  # of which nothing is streamed

    def drawn(device_type: str, host_bytes: int, **fields: Any) -> Blueprint:
        on_host = dict.fromkeys(("weights", "gradients", "optimizer"), "host")
        plan = Plan(precision="bf16", **{**on_host, **fields})
        return draw(specs, plan, Means(2**30, host_bytes, 2**33, machine, 32), device_type)

    for host_bytes in range(5 * 2**28, 2**32, 2**25):
        without = drawn("cuda", host_bytes, early_units=0).host_bytes
        spare = host_bytes - without - 4 * 2 * unit  # besides sums of gradients in fp32
        early = drawn("cuda", host_bytes).early
        early_bytes = int(3 / 4 * spare)
        rows = [(4, 0), (3, 1), (2, 2), (1, 2), (0, 3), (0, 2), (0, 1), (0, 0)]  # weights of two thirds of the others
        num_all, num_weights = next(row for row in rows if (12 * row[0] + 2 * row[1]) * unit <= early_bytes)
        nothing, weights = [InBackward.NOTHING] * (4 - num_all - num_weights), [InBackward.WEIGHTS] * num_weights
        assert early == (*nothing, *weights, *[InBackward.ALL] * num_all)  # the last ones
        assert drawn("cpu", host_bytes).early == (InBackward.NOTHING,) * 4  # the host computes
        seen.add((num_all, num_weights))
    assert seen - {(0, 0)} == {(0, 1), (0, 2), (0, 3), (1, 2), (2, 2), (3, 1), (4, 0)}
    assert drawn("cuda", 2**33, early_units=1).plan.early_units == 1
    assert set(drawn("cuda", 2**33, gradients="none").early) == {InBackward.NOTHING}


def test_a_blueprint_is_drawn_from_values_alone_for_a_gpu_that_is_not_here() -> None:
    specs = four_layers()
    plan = Plan(precision="bf16", weights="device", gradients="host", optimizer="host")
    few_cores = replace(UNMEASURED, host_threads=3)
    drawn = draw(specs, plan, Means(2**30, 2**33, 2**33, few_cores, 3), "cuda")
    assert drawn.places == (UnitPlace("device", "host", "host"),) * len(specs)
    assert sum(drawn.streamed) == int(len(specs) * streamed_part(few_cores)) > 0
    assert drawn.plan.optimizer == tuple((spec.name, "host") for spec in specs)
    assert (drawn.plan.device_bytes, drawn.plan.host_threads) == (2**30, 3)
