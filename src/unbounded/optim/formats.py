"""Encodes fp32 values into the arrays that a rule keeps, and decodes them. Any device, any length.

`exact` completes bf16 weights to their fp32 master by 16 more bits: the weight is the master rounded to nearest
(halves up in magnitude, so that the rest fits a signed 16-bit number), and `remainder` is what is left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unbounded.native import kernels
from unbounded.optim.rules import UpdateRule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype of each precision that a plan may name."""

MASTER_STATES = ("remainder", "master")
"""The states that complete the weights: together they are the master that is trained."""


def encode_weight(master: torch.Tensor, dtype: torch.dtype, rule: UpdateRule | None) -> dict[str, torch.Tensor]:
    """The arrays that stand for the fp32 `master`: "weight" in `dtype`, and what completes it."""
    names = {spec.name for spec in rule.specs} if rule is not None else set()
    if "master" in names:
        return {"weight": master.to(dtype), "master": master}
    if "remainder" not in names or rule is None:
        return {"weight": master.to(dtype)}
    if rule.format == "exact":
        bits = master.view(torch.int32)
        high = (bits + 0x8000) >> 16
        remainder = (bits - (high << 16)).to(torch.int16)
        return {"weight": high.to(torch.int16).view(torch.bfloat16), "remainder": remainder}
    source = master.cpu().contiguous()
    weight = torch.empty(source.numel(), dtype=dtype)
    remainder = torch.empty(source.numel(), dtype=torch.int8)
    kernels.encode_weight(source, weight, remainder)
    return {"weight": weight.to(master.device), "remainder": remainder.to(master.device)}


def decode_weight(arrays: Mapping[str, torch.Tensor], rule: UpdateRule | None) -> torch.Tensor:
    """The fp32 master that `encode_weight` was given (for `compact`: to the precision it keeps)."""
    weight = arrays["weight"]
    if "master" in arrays:
        return arrays["master"]
    if "remainder" not in arrays or rule is None:
        return weight.float()
    if rule.format == "exact":
        bits = (weight.view(torch.int16).to(torch.int32) << 16) + arrays["remainder"].to(torch.int32)
        return bits.view(torch.float32)
    master = torch.empty(weight.numel(), dtype=torch.float32)
    kernels.decode_weight(weight.cpu(), arrays["remainder"].cpu(), master)
    return master.to(weight.device)


def encode_moment(values: torch.Tensor, name: str, rule: UpdateRule) -> dict[str, torch.Tensor]:
    """The arrays of one moment (`exp_avg`, ...) given in fp32."""
    spec = next(spec for spec in rule.specs if spec.name == name)
    if spec.dtype == torch.float32:
        return {name: values}
    codes = torch.empty(values.numel(), dtype=spec.dtype)
    scale = torch.empty(-(-values.numel() // kernels.BLOCK), dtype=torch.float32)
    kernels.encode_moment(values.cpu().contiguous(), codes, scale)
    return {name: codes.to(values.device), f"{name}_scale": scale.to(values.device)}


def decode_moment(arrays: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """One moment in fp32."""
    codes = arrays[name]
    if codes.dtype == torch.float32:
        return codes
    values = torch.empty(codes.numel(), dtype=torch.float32)
    kernels.decode_moment(codes.cpu(), arrays[f"{name}_scale"].cpu(), values)
    return values.to(codes.device)


def moment_names(rule: UpdateRule) -> list[str]:
    """The states that are moments: neither what completes the weights nor scales."""
    return [s.name for s in rule.specs if s.name not in MASTER_STATES and not s.name.endswith("_scale")]
