"""Muon's orthogonalisation on a GPU, with half of each product whose result is symmetric.

Two of the three products of an iteration are: X X^T, and the square of that. Only the tiles on and below the diagonal
are computed, and each is written twice. In bf16 the results are those of torch's own function up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

SIDE, DEPTH = 128, 64  # of a tile of the result, and of what it is computed from at a time
AT_ONCE = 2  # tiles that a multiprocessor computes
RATE = 0.83  # of a product by these tiles, to that of torch's (measured on an H200: 700 and 840 TFLOP/s)


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What torch's Muon computes from a bf16 matrix for which this `pays`. The matrix is changed."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = times_transposed(x)
        update = times_transposed(gram, factor=c, added=gram, added_factor=b)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if is_tall else x


def times_transposed(
    x: Tensor, *, factor: float = 1.0, added: Tensor | None = None, added_factor: float = 0.0
) -> Tensor:
    """`factor` x x^T + `added_factor` `added`, where what is added is symmetric."""
    rows, depth = x.shape
    result = torch.empty(rows, rows, dtype=x.dtype, device=x.device)
    is_transposed = x.stride(1) != 1
    described = (
        TensorDescriptor.from_tensor(x.T, [DEPTH, SIDE])
        if is_transposed
        else TensorDescriptor.from_tensor(x, [SIDE, DEPTH])
    )
    _times_transposed[(_tiles(rows),)](
        described,
        result if added is None else added,
        result,
        rows,
        depth,
        factor,
        added_factor,
        TRANSPOSED=is_transposed,
        ADDS=added is not None,
        SIDE=SIDE,
        DEPTH=DEPTH,
        num_warps=4,
        num_stages=3,
    )
    return result


def pays(matrix: Tensor) -> bool:
    """Whether the tiles fill the GPU so well that half of the products take less time than all of them by torch."""
    rows = min(matrix.shape)
    about = torch.cuda.get_device_properties(matrix.device)
    if TensorDescriptor is None or about.major < 9 or max(matrix.shape) % 8 or rows % 8 or not matrix.is_contiguous():
        return False  # bulk copies into shared memory are of Hopper and later, and need aligned rows
    at_once = AT_ONCE * about.multi_processor_count
    rounds = -(-_tiles(rows) // at_once)
    return rounds * at_once * SIDE**2 < RATE * rows**2


def _tiles(rows: int) -> int:
    side = triton.cdiv(rows, SIDE)
    return side * (side + 1) // 2  # type: ignore[no-any-return]


@triton.jit(do_not_specialize=["factor", "added_factor"])
def _times_transposed(  # type: ignore[no-untyped-def]
    x, added_ptr, result_ptr, size, depth, factor, added_factor,
    TRANSPOSED: tl.constexpr, ADDS: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # The tiles of the lower half are numbered row by row.
    tile = tl.program_id(0)
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    first_row, first_column = row * SIDE, (tile - row * (row + 1) // 2) * SIDE
    sums = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for at in range(0, depth, DEPTH):
        if TRANSPOSED:
            left, right = tl.trans(x.load([at, first_row])), x.load([at, first_column])
        else:
            left, right = x.load([first_row, at]), tl.trans(x.load([first_column, at]))
        sums = tl.dot(left, right, sums)
    rows, columns = first_row + tl.arange(0, SIDE), first_column + tl.arange(0, SIDE)
    places = rows.to(tl.int64)[:, None] * size + columns[None, :]
    live = (rows < size)[:, None] & (columns < size)[None, :]
    if ADDS:
        sums = factor * sums + added_factor * tl.load(added_ptr + places, live, 0.0).to(tl.float32)
    else:
        sums = factor * sums
    value = sums.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + places, value, live)
    if first_row != first_column:
        places = columns.to(tl.int64)[:, None] * size + rows[None, :]
        tl.store(result_ptr + places, tl.trans(value), (columns < size)[:, None] & (rows < size)[None, :])
