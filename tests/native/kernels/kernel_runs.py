"""What the kernels' tests share: state arrays filled for a rule and format, and runs of several steps over them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unbounded.native import kernels
from unbounded.native.kernels import Pool, Rule

RULES = {
    "adamw": Rule("adamw", lr=1e-3, weight_decay=0.1),
    "adam": Rule("adam", lr=1e-3, beta1=0.8, beta2=0.99, weight_decay=0.1),
    "adam maximize": Rule("adam", lr=1e-3, maximize=True),
    "sgd": Rule("sgd", lr=1e-2),
    "sgd momentum": Rule("sgd", lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": Rule("sgd", lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "lion": Rule("lion", lr=1e-3, beta2=0.99, weight_decay=0.1),
    "adagrad": Rule("adagrad", lr=1e-2, eps=1e-10, lr_decay=0.01, weight_decay=0.01),
}
FORMATS = {
    "fp32": ("fp32", torch.float32),
    "exact": ("exact", torch.bfloat16),
    "compact bf16": ("compact", torch.bfloat16),
    "compact fp16": ("compact", torch.float16),
}


def empty_states(rule: Rule, format: str, dtype: torch.dtype, numel: int) -> dict[str, Tensor]:
    specs = kernels.state_arrays(rule.name, format, dtype, momentum=rule.momentum != 0)
    return {name: torch.zeros(spec.numel(numel), dtype=spec.dtype) for name, spec in specs.items()}


def encode(master: Tensor, format: str, dtype: torch.dtype, states: dict[str, Tensor]) -> Tensor:
    """The weights of a master in the format; fills states["remainder"]."""
    if format == "fp32":
        return master.clone()
    weight = torch.empty(master.shape, dtype=dtype)
    (kernels.split if format == "exact" else kernels.encode_weight)(master, weight, states["remainder"])
    return weight


def decode(weight: Tensor, format: str, states: dict[str, Tensor]) -> Tensor:
    if format == "fp32":
        return weight
    master = torch.empty(weight.shape, dtype=torch.float32)
    (kernels.join if format == "exact" else kernels.decode_weight)(weight, states["remainder"], master)
    return master


def train(
    rule: Rule,
    format: str,
    dtype: torch.dtype,
    master: Tensor,
    grads: list[Tensor],
    *,
    pool: Pool | None = None,
    grad_scale: float = 1.0,
) -> dict[str, Tensor]:
    """All arrays after a step for each gradient, including the weights and the decoded master."""
    states = empty_states(rule, format, dtype, master.numel())
    weight = encode(master, format, dtype, states)
    for step, grad in enumerate(grads, 1):
        rule = replace(rule, step=step)
        kernels.update(rule, format, weight=weight, grad=grad, states=states, grad_scale=grad_scale, pool=pool)
    return {**states, "weight": weight, "master": decode(weight, format, states)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
