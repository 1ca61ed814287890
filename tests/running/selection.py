"""Which cases `make test` runs of a test that takes several lists of parameters.

A test over 17 ways to write and 7 plans has 119 cases, most of which fail together or not at all. Where such cases run
over several ranks, which takes most of the time, `make test` runs a third of them, as a Latin square has them: every
value of every list, each with several of the others. Of tests marked `every_second`, whose cases are costly and much
alike, it runs half: of one list every second value, of several lists all values. `make test-all`, and pytest by itself,
run all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import pytest

FEW = 4  # so many cases always run


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that `make test` does not run."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    alike: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every_second"):
            alike[item.nodeid.partition("[")[0]].append(item)
        elif hasattr(item, "callspec") and "ranks" in item.fixturenames:  # type: ignore[attr-defined]
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen = [(cases, choose(list(map(_values, cases)))) for cases in tests.values()]
    chosen += [(cases, _alternate(list(map(_values, cases)), 2)) for cases in alike.values()]
    return {case for cases, flags in chosen for case, is_chosen in zip(cases, flags, strict=True) if not is_chosen}


def choose(cases: Sequence[Sequence[Hashable]]) -> list[bool]:
    """Which of a test's cases run; each has one value of every list."""
    lengths = sorted(len(set(values)) for values in zip(*cases, strict=True))
    if len(cases) <= FEW or len(lengths) < 2:
        return [True] * len(cases)
    return _alternate(cases, min(3, lengths[-2]))  # with a larger share some values would not come up


def _alternate(cases: Sequence[Sequence[Hashable]], share: int) -> list[bool]:
    """One of so many cases, neighbours in every list apart."""
    lists = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    return [sum(map(list.index, lists, case)) % share == 0 for case in cases]


def _values(case: pytest.Item) -> list[Hashable]:
    given = case.callspec.params  # type: ignore[attr-defined]
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    split = [name.split(",") if isinstance(name, str) else name for name in names]
    return [tuple(id(given[name.strip()]) for name in together) for together in split]
