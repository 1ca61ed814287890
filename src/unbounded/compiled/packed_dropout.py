"""Dropout that draws bits for eight elements at a time.

The compiler draws a random number per element in the kernel that uses it, which takes longer than the memory that the
kernel moves. Here torch's generator fills memory with bits, and the kernel reads 16 of them per element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_CASES = 2**16


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, place: int) -> Tensor:
    dropped = round(p * _CASES)
    if inplace or not training or not 0 < dropped < _CASES:
        return nn.functional.dropout(input, p, training, inplace)
    kept = random_bits(input.shape, place, input.device) >= dropped - _CASES // 2
    return torch.where(kept, input * (_CASES / (_CASES - dropped)), 0.0)


@torch.library.custom_op("unbounded::random_bits", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def random_bits(size: Sequence[int], place: int, device: torch.device) -> Tensor:
    """16 random bits per element, from the device's generator; `place` is where in the graph they are drawn."""
    numel = math.prod(size)
    drawn = torch.empty((numel + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    return drawn.view(torch.int16)[:numel].view(size)


@random_bits.register_fake
def _(size: Sequence[int], place: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int16, device=device)
