"""Every family of models on every mesh, with states on every tier, compared with one rank:

    python -m tests.parallel [--ranks 2 4 8] [--families t5] [--tiers disk] [--meshes tensor "data, tensor"]

Five steps with dropout on (not over a data axis). Prints the largest relative error of losses and norms, and of the
weights; exits with 1 if one is beyond 1e-5 or 1e-4. `make test` has a selection.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import tests.ranks
from tests.parallel.comparing import compare
from tests.parallel.meshes import EIGHT, FAMILIES, FOUR, TWO, Plan, fits

MESHES = {2: TWO, 4: FOUR, 8: EIGHT}
TIERS = ("device", "host", "disk")
STEPS = 5


def on_tier(plan: Plan, tier: str) -> Plan:
    """The plan with its states on `tier`, unless it says itself where they are."""
    wanted = {"optimizer": tier, "gradients": tier} | ({"weights": tier} if plan.get("stage", 3) == 3 else {})
    return wanted | plan


def choose(chosen: argparse.Namespace, size: int, family: str) -> Iterator[tuple[str, Plan]]:
    """The plans that a family is run with, by name, none of them twice."""
    seen: list[Plan] = []
    for name, plan in MESHES[size].items():
        for tier in chosen.tiers if fits(family, plan) and (not chosen.meshes or name in chosen.meshes) else ():
            placed = on_tier(plan, tier)
            if placed not in seen:
                seen.append(placed)
                yield f"{name}; {tier}", placed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--tiers", nargs="+", default=TIERS, choices=TIERS)
    parser.add_argument("--meshes", nargs="+", choices=sorted({name for meshes in MESHES.values() for name in meshes}))
    chosen = parser.parse_args()
    tests.ranks.PRELOAD.append("transformers.modeling_utils")
    tests.ranks.MAX_RANKS = 8
    num_wrong = num_runs = 0
    worst = [0.0, 0.0]
    for size in chosen.ranks:
        for family in chosen.families:
            runs = list(choose(chosen, size, family))
            plans = [plan for _, plan in runs]
            results = tests.ranks.run_ranks(size, compare, family, plans, {}, STEPS, timeout=3600.0)
            for number, (name, _) in enumerate(runs):
                expected, _, (of_weights, where) = results[0][number]
                found = [per_rank[number][1] for per_rank in results]
                error = max(abs(a - b) / b for numbers in found for a, b in zip(numbers, expected, strict=True))
                is_wrong = not (error < 1e-5 and of_weights < 1e-4)
                num_wrong, num_runs = num_wrong + is_wrong, num_runs + 1
                worst = [max(worst[0], error), max(worst[1], of_weights)]
                shown = f"{size} ranks  {family:8} {name:34} losses {error:.1e}  weights {of_weights:.1e} ({where})"
                print(("WRONG " if is_wrong else "      ") + shown, flush=True)
    tests.ranks.close_ranks()
    print(f"{num_runs} runs, {num_wrong} wrong; at worst losses {worst[0]:.1e}, weights {worst[1]:.1e}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
