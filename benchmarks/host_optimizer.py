"""Host AdamW in every state format against torch.optim.AdamW(fused=True), as ratios within one run.

    python benchmarks/host_optimizer.py [--parameters 100000000] [--threads N] [--repetitions 15]

Exits with 1 if a ratio is below what is promised.
"""

from __future__ import annotations

import argparse

from unbounded.cli.bench.host_optimizer import run_host

REQUIRED = {"fp32": 1.0, "exact": 1.0, "compact": 1.4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    rows = run_host(**vars(arguments))
    ratios = {row.name.split(",")[0]: row.ratio for row in rows[1:]}
    short = [f"{name} {ratios[name]:.2f} < {least}" for name, least in REQUIRED.items() if ratios[name] < least]
    print("below the promise: " + ", ".join(short) if short else "every ratio is reached")
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
