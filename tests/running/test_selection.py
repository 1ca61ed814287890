"""`make test` leaves out cases, but no value of any list."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.running.selection import choose, left_out


@pytest.mark.parametrize("lengths", [(2, 3), (17, 7), (2, 2, 5), (3, 4, 1), (6, 2), (1, 9)], ids=str)
def test_every_value_of_every_list_comes_up_in_fewer_cases(lengths: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, lengths)))
    chosen = list(itertools.compress(cases, choose(cases)))
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == list(lengths)
    assert len(chosen) <= (len(cases) + 1) / 2 or 1 in lengths


@pytest.mark.parametrize("cases", [[(0,), (1,), (2,), (3,), (4,)], list(itertools.product("ab", "cd"))], ids=str)
def test_tests_with_one_list_or_few_cases_run_whole(cases: list[tuple[object, ...]]) -> None:
    assert all(choose(cases))


@pytest.mark.every_second
@pytest.mark.parametrize("value", range(4))
def test_every_second_case_of_a_marked_test_runs(request: Any, value: int) -> None:
    cases = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    left = left_out(request.session.items)
    assert request.config.getoption("--selected") or [case in left for case in cases] == [False, True] * 2
    assert value % 2 == 0 or not request.config.getoption("--selected")
