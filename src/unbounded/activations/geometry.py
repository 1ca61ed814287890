"""How a tensor is laid out in memory, so that it comes back from the host with the same layout.

Strides decide which kernel runs, and so the last bits of its result: a transposed input must come back transposed. An
expanded tensor (a mask for every head) is stored without its repetitions. One with gaps (a slice of a wider
tensor) is copied together first, as `clone` would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """The shape and strides of a tensor over a flat run of elements that starts with its own first."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in `flat`."""
        return flat.as_strided(self.shape, self.strides)


@torch.no_grad()
def lay_flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Geometry]:
    """The tensor's own memory as a flat run, or a copy if it has gaps, and its layout there."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    sizes = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    base = tensor.detach().as_strided(sizes, strides)
    if not is_dense(sizes, strides):
        base = base.clone()
        strides = tuple(0 if old == 0 else new for old, new in zip(strides, base.stride(), strict=True))
    return base.as_strided((base.numel(),), (1,)), Geometry(shape, strides)


def is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill one run of memory, each place once, in any order of the dims."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is plain memory on `device` that can be copied away and back."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
