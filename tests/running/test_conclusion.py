"""The last line of a test run says what held, what did not, and what this machine could not check."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.running.conclusion import conclude, write_durations

PASSED, FAILED = SimpleNamespace(nodeid="a", duration=1.0), SimpleNamespace(nodeid="b", duration=2.0)
SKIPPED = SimpleNamespace(nodeid="c", duration=0.0, longrepr=("file", 1, "Skipped: without a GPU"))


@pytest.mark.parametrize(
    ("stats", "exit_code", "said"),
    [
        ({"passed": [PASSED] * 1200}, 0, "1,200 passed, 0 failed, 0 skipped: everything this machine can check holds"),
        (
            {"passed": [PASSED], "skipped": [SKIPPED] * 2},
            0,
            "1 passed, 0 failed, 2 skipped (2 without a GPU): everything this machine can check holds",
        ),
        ({"passed": [PASSED], "failed": [FAILED]}, 1, "1 passed, 1 failed, 0 skipped: something is broken, see above"),
        ({"error": [FAILED]}, 1, "0 passed, 1 failed, 0 skipped: something is broken, see above"),
        (
            {"passed": [PASSED]},
            2,
            "1 passed, 0 failed, 0 skipped: the tests did not run to their end (exit code 2)",
        ),
    ],
)
def test_the_conclusion_is_one_honest_line(stats: dict[str, list[SimpleNamespace]], exit_code: int, said: str) -> None:
    assert conclude(stats, exit_code) == said


def test_durations_are_listed_slowest_first(tmp_path: Path) -> None:
    write_durations([PASSED, FAILED, FAILED], tmp_path)
    lines = (tmp_path / "build" / "test-durations.txt").read_text().splitlines()
    assert [line.split() for line in lines] == [["4.00", "b"], ["1.00", "a"]]
