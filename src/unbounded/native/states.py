"""Update rules and the arrays that each keeps, by state format: names, dtypes, sizes.

fp32     weights are the fp32 master; moments fp32
exact    bf16 weights + `remainder` int16 (together the fp32 master, exactly reversible); moments fp32
compact  bf16 or fp16 weights + `remainder` int8; moments 8-bit codes with one fp32 `_scale` for every BLOCK elements

Names are torch.optim's: exp_avg and momentum_buffer are first moments (signed), exp_avg_sq and sum second ones.
Moments start as zeros; `remainder` starts as what the first weights leave over. In the compact format zeros are the
code of zero moments and a zero scale. Pure: no tensors are touched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from unbounded.errors import PlanError

BLOCK = 128

RULES = ("adamw", "adam", "sgd", "lion", "adagrad")
FORMATS = ("fp32", "exact", "compact")
FIRST_MOMENTS = {"adamw": "exp_avg", "adam": "exp_avg", "lion": "exp_avg", "sgd": "momentum_buffer"}
SECOND_MOMENTS = {"adamw": "exp_avg_sq", "adam": "exp_avg_sq", "adagrad": "sum"}
DECOUPLED = ("adamw", "lion")
WEIGHT_DTYPES = {
    "fp32": (torch.float32,),
    "exact": (torch.bfloat16,),
    "compact": (torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class Rule:
    """One step of an optimizer with every hyper-parameter resolved; semantics are torch.optim's (Lion: its paper's)."""

    name: str
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    lr_decay: float = 0.0
    step: int = 1  # the step being taken, from 1

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise PlanError(f'the rule "{self.name}" is unknown. Choose one of {", ".join(RULES)}.')
        if self.step < 1:
            raise PlanError(f"step {self.step} was given to {self.name}. Steps count from 1.")


class UpdatePart(Enum):
    """What of an update is written: WEIGHTS, from the old moments, and then MOMENTS give the bits of WHOLE."""

    WHOLE = 0
    WEIGHTS = 1
    MOMENTS = 2


def has_parts(rule: Rule, format: str) -> bool:
    """Whether this step may be done in two parts: its moments do not depend on the weights, nor are they encoded."""
    has_moments = any(moments(rule.name, momentum=rule.momentum != 0))
    return has_moments and format != "compact" and (rule.name in DECOUPLED or rule.weight_decay == 0)


@dataclass(frozen=True)
class ArraySpec:
    """One array of a state: `per_element` or one entry for every BLOCK elements."""

    dtype: torch.dtype
    per_element: bool = True

    @property
    def per_block(self) -> bool:
        return not self.per_element

    def numel(self, elements: int) -> int:
        return elements if self.per_element else -(-elements // BLOCK)

    def num_bytes(self, elements: int) -> int:
        return self.numel(elements) * self.dtype.itemsize


def moments(rule_name: str, *, momentum: bool = True) -> tuple[str | None, str | None]:
    """The names of the first and second moment that the rule keeps."""
    first = FIRST_MOMENTS.get(rule_name)
    return (None if rule_name == "sgd" and not momentum else first), SECOND_MOMENTS.get(rule_name)


def state_arrays(
    rule_name: str, format: str, weight_dtype: torch.dtype, *, momentum: bool = True
) -> dict[str, ArraySpec]:
    """The arrays kept besides the weights; `momentum` says whether sgd has any."""
    check_format(format, weight_dtype)
    if rule_name not in RULES:
        raise PlanError(f'the rule "{rule_name}" is unknown. Choose one of {", ".join(RULES)}.')
    arrays: dict[str, ArraySpec] = {}
    if format != "fp32":
        arrays["remainder"] = ArraySpec(torch.int16 if format == "exact" else torch.int8)
    for name, code in zip(moments(rule_name, momentum=momentum), (torch.int8, torch.uint8), strict=True):
        if name is not None and format == "compact":
            arrays[name] = ArraySpec(code)
            arrays[f"{name}_scale"] = ArraySpec(torch.float32, per_element=False)
        elif name is not None:
            arrays[name] = ArraySpec(torch.float32)
    return arrays


def check_format(format: str, weight_dtype: torch.dtype) -> None:
    """Raises if the format is unknown or does not keep weights of this dtype."""
    if format not in FORMATS:
        raise PlanError(f'the state format "{format}" is unknown. Choose one of {", ".join(FORMATS)}.')
    if weight_dtype not in WEIGHT_DTYPES[format]:
        allowed = " or ".join(str(dtype) for dtype in WEIGHT_DTYPES[format])
        raise PlanError(f'the state format "{format}" keeps weights in {allowed}, not {weight_dtype}. Choose another.')
