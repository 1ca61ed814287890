"""System calls that fail, or at which the process is killed, in saves, loads and exports.

Here some calls of each get each fault; `python -m tests.faults` goes through all of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.calls import run_calls
from tests.faults.scenarios import SCENARIOS
from tests.faults.shim import build

FAULTS = ["kill", "EIO", "ENOSPC"]
MOST = 3


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    shim = build(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("needs a C compiler")
    return list(run_calls(Path(shim), list(SCENARIOS), FAULTS, MOST))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whatever_call_fails_nothing_is_lost_and_the_error_is_told(cases: list[dict[str, Any]], scenario: str) -> None:
    found = [case for case in cases if case["scenario"] == scenario]
    counts = Counter(case["fault"] for case in found)
    assert set(counts) == set(FAULTS)
    assert min(counts.values()) >= 3
    assert not [case for case in found if case["problem"]]
    told = [case["error"] for case in found if case["fault"] == "EIO"]
    assert any("DiskError" in error and "errno 5" in error for error in told)
    assert all(case["error"] == "killed" for case in found if case["fault"] == "kill")
