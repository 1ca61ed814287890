"""Turns Lightning's precision flags into the plan's, and finds the one optimizer that a strategy shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unbounded.errors import PlanError
from unbounded.planner.plan import Plan

_PRECISIONS = {
    "32-true": None,
    "32": None,
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "bf16": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "16": "fp16",
}


def with_precision(plan: Plan, flag: Any) -> Plan:
    """The plan with the precision that Lightning was asked for."""
    if str(flag) not in _PRECISIONS:
        raise PlanError(
            f'precision={flag!r} is not available with strategy="unbounded". Use bf16-mixed, 16-mixed or 32.'
        )
    asked = _PRECISIONS[str(flag)]
    if plan.precision is not None and asked not in (None, plan.precision):
        raise PlanError(f"the plan has precision={plan.precision!r} and Lightning has {flag!r}. Give one of them.")
    return replace(plan, precision=plan.precision or asked)


def only_optimizer(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The optimizer of a module; a module with several cannot be sharded as one."""
    if len(optimizers) != 1:
        raise PlanError(
            f"the module has {len(optimizers)} optimizers, but only one is supported. Put the parameters into "
            "groups of one optimizer, each with its own options."
        )
    return optimizers[0]


def refuse_clipping_by_value() -> None:
    raise PlanError("gradients cannot be clipped by value. Clip by norm: gradient_clip_algorithm='norm'.")
