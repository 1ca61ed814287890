"""Every family of models on every mesh beside one rank:  python -m tests.parallel [--ranks 2 4 8] [--families t5]

Five steps with dropout on (not over a data axis). Prints the largest relative error of losses and norms, and of the
weights; ends with 1 where one is beyond 1e-5 or 1e-4. `make test` has a selection.
"""

from __future__ import annotations

import argparse
import sys

import tests.ranks
from tests.parallel.comparing import compare
from tests.parallel.meshes import EIGHT, FAMILIES, FOUR, TWO, fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    chosen = parser.parse_args()
    tests.ranks.PRELOAD.append("transformers.modeling_utils")
    tests.ranks.MAX_RANKS = 8
    num_wrong = num_runs = 0
    for size in chosen.ranks:
        for family in chosen.families:
            meshes = {name: plan for name, plan in {2: TWO, 4: FOUR, 8: EIGHT}[size].items() if fits(family, plan)}
            results = tests.ranks.run_ranks(size, compare, family, list(meshes.values()), {}, timeout=1800.0)
            for number, name in enumerate(meshes):
                expected, _, (of_weights, where) = results[0][number]
                found = [per_rank[number][1] for per_rank in results]
                error = max(abs(a - b) / b for numbers in found for a, b in zip(numbers, expected, strict=True))
                is_wrong = not (error < 1e-5 and of_weights < 1e-4)
                num_wrong, num_runs = num_wrong + is_wrong, num_runs + 1
                shown = f"{size} ranks  {family:8} {name:24} losses {error:.1e}  weights {of_weights:.1e} ({where})"
                print(("WRONG " if is_wrong else "      ") + shown, flush=True)
    tests.ranks.close_ranks()
    print(f"{num_runs} runs, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
