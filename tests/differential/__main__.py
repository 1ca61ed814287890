"""`python -m tests.differential FIRST LAST` runs the cases of these seeds and prints what differs."""

from __future__ import annotations

import collections
import sys
import tempfile
import time

from tests.differential.cases import draw_case
from tests.differential.comparing import find_differences
from tests.differential.running import run_ours, run_plain
from tests.ranks import RankError, close_ranks, run_ranks


def check(seed: int) -> tuple[str, str]:
    """The outcome of a case ("same", "differs", "refused", "broken", "no case") and what there is to say of it."""
    case = draw_case(seed)
    try:
        expected = run_plain(case)
    except (ValueError, RuntimeError) as error:
        return "no case", str(error)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = run_ranks(case.world_size, run_ours, case, folder, timeout=120.0)
        except RankError as error:
            return "broken", str(error)
    if any(kind == "refused" for kind, _ in results):
        return "refused", next(text for kind, text in results if kind == "refused")
    worst = 0.0
    for rank, (_, found) in enumerate(results):
        differing, error = find_differences(case, expected, found, rank)
        worst = max(worst, error)
        if differing:
            return "differs", f"rank {rank}: {differing[:4]}"
    return "same", f"{worst:.1e}"


def main(first: int, last: int) -> int:
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(first, last):
        began = time.monotonic()
        outcome, text = check(seed)
        outcomes[outcome] += 1
        print(f"{seed} {outcome} ({time.monotonic() - began:.1f} s) {text}", flush=True)
    print(dict(outcomes))
    close_ranks()
    return outcomes["differs"] + outcomes["broken"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
