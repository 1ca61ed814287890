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


# Elements that are encoded or decoded at a time on their way through fp32 and int32.
SLICE_NUMEL = 2**24


def encode_weight(values: torch.Tensor, dtype: torch.dtype, rule: UpdateRule | None) -> dict[str, torch.Tensor]:
    """The arrays that stand for `values`, a flat tensor: "weight" in `dtype`, and what completes it."""
    dtypes = {spec.name: spec.dtype for spec in rule.specs} if rule is not None else {}
    if "remainder" in dtypes and values.dtype == dtype:  # nothing is left over
        return {"weight": values, "remainder": torch.zeros_like(values, dtype=dtypes["remainder"])}
    if "master" in dtypes:
        return {"weight": values.to(dtype), "master": values.float()}
    if "remainder" not in dtypes or rule is None:
        return {"weight": values.float().to(dtype) if values.dtype == torch.float64 else values.to(dtype)}
    if rule.format == "exact":
        return _encode_exact(values)
    source = values.cpu().float().contiguous()
    weight = torch.empty(source.numel(), dtype=dtype, device="cpu")
    remainder = torch.empty(source.numel(), dtype=torch.int8, device="cpu")
    kernels.encode_weight(source, weight, remainder)
    return {"weight": weight.to(values.device), "remainder": remainder.to(values.device)}


def _encode_exact(values: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    remainder = torch.empty(values.shape, dtype=torch.int16, device=values.device)
    parts = (tensor.split(SLICE_NUMEL) for tensor in (values, weight.view(torch.int16), remainder))
    for value, high, low in zip(*parts, strict=True):
        bits = value.float().view(torch.int32)
        rounded = (bits + 0x8000).bitwise_right_shift_(16)
        high.copy_(rounded)
        low.copy_(bits - rounded.bitwise_left_shift_(16))
    return {"weight": weight, "remainder": remainder}


def decode_weight(arrays: Mapping[str, torch.Tensor], rule: UpdateRule | None) -> torch.Tensor:
    """The fp32 master that `encode_weight` was given (for `compact`: to the precision it keeps)."""
    weight = arrays["weight"]
    if "master" in arrays:
        return arrays["master"]
    if "remainder" not in arrays or rule is None:
        return weight.float()
    if rule.format == "exact":
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(arrays["remainder"]).view(torch.float32)
    master = torch.empty(weight.numel(), dtype=torch.float32, device="cpu")
    kernels.decode_weight(weight.cpu(), arrays["remainder"].cpu(), master)
    return master.to(weight.device)


def encode_moment(values: torch.Tensor, name: str, rule: UpdateRule) -> dict[str, torch.Tensor]:
    """The arrays of one moment (`exp_avg`, ...) given in fp32."""
    spec = next(spec for spec in rule.specs if spec.name == name)
    if spec.dtype.is_floating_point:
        return {name: values.to(spec.dtype)}
    codes = torch.empty(values.numel(), dtype=spec.dtype, device="cpu")
    scale = torch.empty(-(-values.numel() // kernels.BLOCK), dtype=torch.float32, device="cpu")
    kernels.encode_moment(values.cpu().contiguous(), codes, scale)
    return {name: codes.to(values.device), f"{name}_scale": scale.to(values.device)}


def decode_moment(arrays: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """One moment in fp32."""
    codes = arrays[name]
    if codes.dtype.is_floating_point:
        return codes.float()
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    kernels.decode_moment(codes.cpu(), arrays[f"{name}_scale"].cpu(), values)
    return values.to(codes.device)


def moment_names(rule: UpdateRule) -> list[str]:
    """The states that are moments: neither what completes the weights nor scales."""
    return [s.name for s in rule.specs if s.name not in MASTER_STATES and not s.name.endswith("_scale")]
