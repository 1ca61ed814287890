"""`make test` leaves out cases, but no value of any list."""

from __future__ import annotations

import itertools

import pytest

from tests.running.selection import choose


@pytest.mark.parametrize("lengths", [(2, 3), (17, 7), (2, 2, 5), (3, 4, 1), (6, 2), (1, 9)], ids=str)
def test_every_value_of_every_list_comes_up_in_fewer_cases(lengths: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, lengths)))
    chosen = list(itertools.compress(cases, choose(cases)))
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == list(lengths)
    assert len(chosen) <= (len(cases) + 1) / 2 or 1 in lengths


@pytest.mark.parametrize("cases", [[(0,), (1,), (2,), (3,), (4,)], list(itertools.product("ab", "cd"))], ids=str)
def test_tests_with_one_list_or_few_cases_run_whole(cases: list[tuple[object, ...]]) -> None:
    assert all(choose(cases))
