"""Dropout that draws a number per row and a number per column, and not one per element.

The compiler draws a random number per element in the kernel that uses it, which takes longer than the memory that the
kernel moves. Here an element's number is the low half of the product of its row's and its column's: one multiplication,
wherever it is needed. So what is dropped is never in memory, and a backward finds it from the same few numbers. In
counts of rows and columns, and in correlations of two and of four elements, these bits are like independent ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_CASES = 2**32


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, place: int) -> Tensor:
    dropped = round(p * _CASES)
    if inplace or not training or not 0 < dropped < _CASES or input.dim() == 0:
        return nn.functional.dropout(input, p, training, inplace)
    width = input.shape[-1]
    numbers = odd_numbers(math.prod(input.shape[:-1]) + width, place, input.device)
    columns, rows = numbers[:width], numbers[width:].view(*input.shape[:-1], 1)
    kept = rows * columns >= dropped - _CASES // 2
    return torch.where(kept, input * (_CASES / (_CASES - dropped)), 0.0)


@torch.library.custom_op("unbounded::odd_numbers", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def odd_numbers(count: int, place: int, device: torch.device) -> Tensor:
    """Random odd numbers of 32 bits, from the device's generator; `place` is where in the graph they are drawn."""
    drawn = torch.empty(count, dtype=torch.int32, device=device).random_(-(2**31), 2**31)
    return drawn.bitwise_or_(1)


@odd_numbers.register_fake
def _(count: int, place: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=device)
