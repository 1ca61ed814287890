"""The two passes of `entropy` as Triton kernels: logits are read once for the sums, read and written once for the
gradient, and never copied. Imported only if logits are on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unbounded.activations.tiled.entropy import Entropy, RowSums, TorchKernels
from unbounded.tiers.current_device import on_device

BLOCK, NUM_WARPS = 4096, 8


class TritonKernels(TorchKernels):
    """One program per row."""

    @staticmethod
    def sum_rows(logits: torch.Tensor, labels: torch.Tensor, entropy: Entropy) -> RowSums:
        sums = torch.empty(4, logits.shape[0], dtype=torch.float32, device=logits.device)
        with on_device(logits.device):
            _sum_rows[(logits.shape[0],)](
                logits,
                labels,
                *sums,
                logits.stride(0),
                logits.shape[1],
                float(entropy.scale),
                float(entropy.softcap or 1.0),
                HAS_CAP=entropy.softcap is not None,
                HAS_TOTAL=entropy.label_smoothing != 0.0,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
        return RowSums(*sums)

    @staticmethod
    def write_gradient(
        logits: torch.Tensor,
        out: torch.Tensor,
        labels: torch.Tensor,
        entropy: Entropy,
        logsumexp: torch.Tensor,
        factor: torch.Tensor,
        kept: torch.Tensor,
        num_classes: int,
    ) -> None:
        with on_device(logits.device):
            _write_gradient[(logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))](
                logits,
                out,
                labels,
                logsumexp,
                factor,
                kept,
                logits.stride(0),
                out.stride(0),
                logits.shape[1],
                float(entropy.scale),
                float(entropy.softcap or 1.0),
                float(entropy.label_smoothing),
                float(entropy.label_smoothing / num_classes),
                HAS_CAP=entropy.softcap is not None,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )


@triton.jit
def _cap(z, cap):  # type: ignore[no-untyped-def]
    return cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    logits,
    labels,
    maxima,
    exponentials,
    labelled,
    totals,
    stride,
    num_classes,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    maximum = -3.0e38  # not infinity, because infinity minus infinity is not a number
    exponential = 0.0
    total = 0.0
    for start in range(0, num_classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_classes
        z = tl.load(base + column, mask=inside, other=0.0).to(tl.float32) * scale
        if HAS_CAP:
            z = _cap(z, cap)
        if HAS_TOTAL:
            total += tl.sum(tl.where(inside, z, 0.0))
        z = tl.where(inside, z, -3.0e38)
        higher = tl.maximum(maximum, tl.max(z))
        exponential = exponential * tl.exp(maximum - higher) + tl.sum(tl.where(inside, tl.exp(z - higher), 0.0))
        maximum = higher
    label = tl.load(labels + row)
    z = tl.load(base + label, mask=label >= 0, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        z = _cap(z, cap)
    tl.store(maxima + row, maximum)
    tl.store(exponentials + row, exponential)
    tl.store(labelled + row, z)
    tl.store(totals + row, total)


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    logits,
    out,
    labels,
    logsumexps,
    factors,
    kepts,
    stride,
    out_stride,
    num_classes,
    scale,
    cap,
    smoothing,
    smoothing_each,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_classes
    label = tl.load(labels + row)
    kept = tl.load(kepts + row)
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        z = _cap(z, cap)
    gradient = tl.exp(z - tl.load(logsumexps + row)) * tl.load(factors + row) - kept * smoothing_each
    gradient = tl.where(column == label, gradient - kept * (1.0 - smoothing), gradient)
    if HAS_CAP:
        gradient = gradient * (1.0 - (z / cap) * (z / cap))
    tl.store(out + row * out_stride + column, (gradient * scale).to(out.dtype.element_ty), mask=inside)
