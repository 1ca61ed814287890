"""The long suite of injected faults:  python -m tests.faults

Every call of saves, loads and exports with every fault; kills at random moments; flipped bits; fuzzed manifests. Takes
half an hour on two busy cores and says what it does; `make test` has a selection. Ends with the number of cases, and
with 1 where one of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.faults.calls import ROOT, run_calls
from tests.faults.scenarios import SCENARIOS
from tests.faults.shim import build

FAULTS = ["kill", "EIO", "ENOSPC", "EDQUOT", "EROFS"]
LONG = {"UNBOUNDED_FUZZ": "5000", "UNBOUNDED_KILLS": "100", "UNBOUNDED_FLIPS": "500"}
TESTS = [
    "tests/checkpoint/test_faults.py",
    "tests/checkpoint/refused/test_damage.py",
    "tests/checkpoint/refused/test_hostile.py",
]


def run_all_calls() -> tuple[Counter[str], int]:
    """The number of cases of every scenario, and how many of them failed."""
    counts: Counter[str] = Counter()
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="shim-") as folder:
        shim = build(Path(folder))
        if shim is None:
            print("calls of the system: left out, since there is no C compiler")
            return counts, 0
        for case in run_calls(shim, list(SCENARIOS), FAULTS, 0):
            if case["scenario"] not in counts:
                print(f"faults at every call of: {case['scenario']}", flush=True)
            counts[case["scenario"]] += 1
            if case["problem"]:
                num_wrong += 1
                print(f"WRONG {case['scenario']}: {case['fault']} at call {case['at']} ({case['call']})")
                print(f"      {case['error']}\n      {case['problem']}")
    return counts, num_wrong


def main() -> int:
    counts, num_wrong = run_all_calls()
    for scenario, count in counts.items():
        print(f"{count:5} faults in: {scenario}")
    print(f"{sum(counts.values()):5} faults at calls of the system, {num_wrong} wrong", flush=True)
    environment = {**os.environ, **LONG}
    command = [sys.executable, "-m", "pytest", "-v", "--durations=5", *TESTS]  # a line for every test, as it ends
    tests = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    print(", ".join(f"{name.removeprefix('UNBOUNDED_').lower()}: {value}" for name, value in LONG.items()))
    return 1 if num_wrong or tests.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
