"""How far two runs may be apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.differential.cases import Case
from tests.differential.models import Net

Seen = list[tuple[str, Any]]


def find_differences(case: Case, expected: Seen, found: Seen, rank: int) -> tuple[list[str], float]:
    """What differs, in words, and the largest difference of weights as a part of how far training has moved them."""
    torch.manual_seed(case.seed)
    first = {name: value.float() for name, value in Net(case.model).state_dict().items()}
    of_number, of_weights = tolerances(case)
    differing, worst = [], 0.0
    if [label for label, _ in expected] != [label for label, _ in found]:
        return ["another order of events"], 0.0
    for (label, wanted), (_, got) in zip(expected, found, strict=True):
        if isinstance(wanted, dict):
            error = weight_error(got, wanted, first)
            worst = max(worst, error)
            if not error <= of_weights:
                names = sorted(wanted, key=lambda n: -float((got[n] - wanted[n]).norm()))[:3]
                differing.append(f"{label}: off by {error:.1e}, most in {names}")
        else:
            wanted = wanted[rank] if isinstance(wanted, list) else wanted
            error = abs(wanted - got) / max(abs(wanted), 0.1)
            if not error <= of_number:
                differing.append(f"{label}: {got} instead of {wanted}")
    return differing, worst


def tolerances(case: Case) -> tuple[float, float]:
    """Of numbers, and of weights."""
    if case.plan.get("optimizer_format") == "compact":
        return 0.05, 0.2
    if case.precision != "fp32":
        return 0.05, 0.1 if case.precision == "bf16" else 0.05
    return (1e-2, 0.1) if case.optimizer == "muon" else (1e-4, 1e-4)  # it computes in bf16


def weight_error(found: dict[str, Tensor], expected: dict[str, Tensor], first: dict[str, Tensor]) -> float:
    if list(found) != list(expected):
        return float("nan")
    moved = sum(float((expected[name] - first[name]).double().square().sum()) for name in expected)
    apart = sum(float((expected[name] - found[name]).double().square().sum()) for name in expected)
    return (apart / max(moved, 1e-6)) ** 0.5
