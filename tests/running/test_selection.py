"""`make test` leaves out cases, but no value of any list."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.running.selection import choose, left_out


@pytest.mark.parametrize("lengths", [(2, 3), (17, 7), (2, 2, 5), (3, 4, 1), (6, 2), (1, 9)], ids=str)
def test_every_value_of_every_list_comes_up_in_fewer_cases(lengths: tuple[int, ...]) -> None:
    cases = list(product(*map(range, lengths)))
    chosen = list(itertools.compress(cases, choose(cases)))
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == list(lengths)
    assert len(chosen) <= (len(cases) + 1) / 2 or 1 in lengths


@pytest.mark.parametrize("cases", [[(0,), (1,), (2,), (3,), (4,)], list(product("ab", "cd"))], ids=str)
def test_tests_with_one_list_or_few_cases_run_whole(cases: list[tuple[object, ...]]) -> None:
    assert all(choose(cases))


def test_half_of_the_cases_of_a_marked_test_run() -> None:
    one, two = [[Case(f"test_{n}", values) for values in product(range(4), repeat=n)] for n in (1, 2)]
    others = [Case("test_unmarked", (value,), marker="gpu") for value in range(4)]
    items: Any = [*others[:2], *two, *others[2:], *one]
    ran = [case for case in items if case not in left_out(items)]
    assert [case.values for case in ran if case in one] == [(0,), (2,)]
    assert [case.values for case in ran if case in two] == [case.values for case in two if sum(case.values) % 2 == 0]
    assert set(others) <= set(ran)


@dataclass(frozen=True)
class Case:
    """What `left_out` asks of a test's case: it has one of its `values` from each list."""

    test: str
    values: tuple[int, ...]
    marker: str = "every_second"
    fixturenames: tuple[str, ...] = ()

    @property
    def nodeid(self) -> str:
        return f"tests/test_costly.py::{self.test}[{self.values}]"

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={f"p{index}": value for index, value in enumerate(self.values)})

    def iter_markers(self, name: str) -> list[Any]:
        return [SimpleNamespace(args=(f"p{index}",)) for index in range(len(self.values))]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.marker else None
