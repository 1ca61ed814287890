"""Every architecture of the zoo over every parallel axis on two ranks, compared with plain PyTorch on one:

    python -m tests.zoo [NAME ...]

Three steps in fp32. A run is right (losses to 1e-5, weights to 1e-3, both relative), or refused with one of our errors.
Prints a line each; exits with 1 if one is neither.
"""

from __future__ import annotations

import sys
from typing import Any

import tests.ranks
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.over_axes import compare_over

AXES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


def main() -> int:
    tests.ranks.PRELOAD.append("transformers.modeling_utils")
    counts = {"right": 0, "refused": 0, "WRONG": 0}
    for name in sys.argv[1:] or ARCHITECTURES:
        for axis, plan in AXES.items():
            try:
                result = tests.ranks.run_ranks(2, compare_over, name, plan, timeout=600.0)[0]
            except tests.ranks.RankError as error:
                result, verdict = str(error).strip().splitlines()[-1], "WRONG"
            else:
                is_right = not isinstance(result, str) and result[0] < 1e-5 and result[1] < 1e-3
                verdict = "refused" if isinstance(result, str) else "right" if is_right else "WRONG"
            counts[verdict] += 1
            shown = result if isinstance(result, str) else f"losses {result[0]:.1e}, weights {result[1]:.1e}"
            print(f"{verdict:8} {name:20} {axis:9} {shown}", flush=True)
    tests.ranks.close_ranks()
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
