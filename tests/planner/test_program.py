"""The solver equals brute force over all choices, and says when nothing fits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from unbounded.planner.linear.program import Group, Option, Phase, Program, solve_program
from unbounded.planner.linear.simplex import minimize
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.solve import PlaceOptions, Solved, StateChoice, find_alike, solve
from unbounded.planner.step.loads import Setup
from unbounded.planner.unit_bytes import Budget, UnitBytes

MIB = 2**20


def brute_force(program: Program) -> float | None:
    """The least value over every way to give every thing an option."""
    ways = []
    for group in program.groups:
        numbers = itertools.product(range(group.count + 1), repeat=len(group.options))
        ways.append([number for number in numbers if sum(number) == group.count])
    values = []
    for choice in itertools.product(*ways):
        counts = np.array([count for part in choice for count in part], dtype=float)
        if program.fits(counts):
            values.append(program.value(counts))
    return min(values, default=None)


def random_program(rng: random.Random) -> Program:
    lanes, tiers = 5, 3
    groups = tuple(
        Group(
            str(number),
            rng.randint(1, 4),
            tuple(
                Option(
                    (str(option),),
                    tuple(rng.choice((0.0, rng.random())) for _ in range(lanes)),
                    tuple(float(rng.choice((0, 1, 2, 3, 5))) for _ in range(tiers)),
                    burden=1e-4 * rng.random(),
                )
                for option in range(rng.randint(1, 4))
            ),
        )
        for number in range(rng.randint(1, 3))
    )
    phases = (Phase(1.0, (0, 1, 2)), Phase(rng.choice((1.0, 3.0)), (2, 3, 4)))
    base = tuple(rng.choice((0.0, rng.random())) for _ in range(lanes))
    return Program(groups, phases, base, tuple(float(rng.randint(0, 14)) for _ in range(tiers)))


def random_units(rng: random.Random) -> list[UnitBytes]:
    units = []
    for index in range(rng.randint(1, 4)):
        numel = int(rng.choice((1, 1, 2, 3)) * MIB * rng.choice((1, 1, 1, 1.37)))
        frozen = rng.random() < 0.15
        states = () if frozen else (2 * numel, 8 * numel, 2 * numel, 4 * numel)
        units.append(UnitBytes(f"u{index}", 2 * numel, *(states or (0, 0))))
    return units


def check(program: Program) -> bool:
    """Whether anything fits, once the solver has agreed with brute force."""
    solution, best = solve_program(program), brute_force(program)
    assert (solution is None) == (best is None)
    if solution is None or best is None:
        return False
    assert solution.value * program.scale == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert solution.bound * program.scale <= best * (1 + 1e-6) + 1e-9
    return True


def test_random_programs_are_solved_as_by_brute_force() -> None:
    rng = random.Random(1)
    feasible = [check(random_program(rng)) for _ in range(150)]
    assert 20 < sum(feasible) < 150


def test_random_placements_are_those_of_brute_force_on_random_machines() -> None:
    rng = random.Random(2)
    feasible = 0
    for _ in range(75):
        units = random_units(rng)
        total = sum(7 * unit.weights for unit in units)
        machine = replace(
            UNMEASURED,
            disk_both=rng.choice((0.5e9, 3e9, 20e9)),
            both_ways=rng.choice((5e9, 40e9)),
            host_threads=rng.choice((1, 4, 16)),
        )
        setup = Setup(accumulate=rng.choice((1, 1, 2, 8)))
        room = {
            "device": int(total * rng.random() * rng.choice((0, 1, 1))),
            "host": int(total * rng.random()),
            "disk": int(total * rng.choice((0.3, 1, 2))),
        }
        for uses_disk in (False, True):
            options = PlaceOptions(machine, setup)
            program = StateChoice(find_alike(units, Plan()), options, uses_disk=uses_disk).program(room)
            if np.prod([float(len(group.options)) ** group.count for group in program.groups]) <= 3000:
                feasible += check(program)
    assert feasible > 30


def test_two_solves_give_the_same_placement() -> None:
    rng = random.Random(3)
    units = [unit for _ in range(10) for unit in random_units(rng)]
    budget = Budget(40 * MIB, 100 * MIB, 2**40)
    first, second = (solve(units, budget, Plan(), UNMEASURED) for _ in range(2))
    assert isinstance(first, Solved)
    assert first == second


def test_a_linear_program_without_a_solution_has_none() -> None:
    costs, row = np.array([1.0, 1.0]), np.array([[1.0, 1.0]])
    assert minimize(costs, row, np.array([1.0]), row, np.array([2.0])) is None
    value, x = minimize(costs, -row, np.array([-3.0]), np.zeros((0, 2)), np.zeros(0)) or (0.0, costs)
    assert value == pytest.approx(3.0)
    assert x.sum() == pytest.approx(3.0)


def test_hundreds_of_equal_units_are_one_group() -> None:
    units = [UnitBytes(f"b{i}", 2 * MIB, 2 * MIB, 8 * MIB, 2 * MIB, 4 * MIB) for i in range(500)]
    options = PlaceOptions(UNMEASURED, Setup())
    choice = StateChoice(find_alike(units, Plan()), options, uses_disk=False)
    assert len(choice.groups()) == 1
    solved = solve(units, Budget(1000 * MIB, 2000 * MIB, 2**40), Plan(), UNMEASURED)
    assert isinstance(solved, Solved)
    order = [("device", "host", "disk").index(where.optimizer) for where in solved.places]
    assert order == sorted(order)  # the first units get the fastest places
