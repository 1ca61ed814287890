"""`make test` leaves out cases, but no value of any list."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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


def test_every_second_case_of_a_marked_test_runs() -> None:
    marked = [Case(f"tests/test_costly.py::test_fault[{index}]", "every_second") for index in range(5)]
    others = [Case(f"tests/test_cheap.py::test_value[{index}]", "gpu") for index in range(5)]
    items: Any = [*others[:2], *marked, *others[2:]]
    assert left_out(items) == {marked[1], marked[3]}


@dataclass(frozen=True)
class Case:
    """What `left_out` asks of a test's case."""

    nodeid: str
    marker: str
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.marker else None
