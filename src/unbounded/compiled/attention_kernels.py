"""Attention with dropout as Triton kernels. Imported only if a compiled block on a GPU has one.

Which probabilities are dropped depends on a seed and their place, so the backward finds them again. A row and a column
have a hash each, and a probability the low half of their product: one multiplication, where the generators of other
kernels take twenty. In counts of rows and columns, and in correlations of two and of four of them, these bits are like
independent ones.

Sequences of one block have a backward of one kernel, which reads and writes everything once. Longer ones have two: the
queries' gradient over blocks of keys, and that of keys and values over blocks of queries.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
FORWARD = {"ROWS": 128, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_QUERY = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_KEY = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
WHOLE = {"num_warps": 8, "num_stages": 1}
LONGEST_WHOLE = 128


def forward(
    query: Tensor, key: Tensor, value: Tensor, seed: Tensor, *, p: float, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, laid out as (batch, row, head, dim), and the base-2 logarithm of each row's sum."""
    batch, heads, length, width = query.shape
    result, logs = _like(query), torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(length, FORWARD["ROWS"]), batch * heads)
    _forward[grid](
        query, key, value, result, logs, seed,
        *_strides(query, key, value, result),
        heads, length, scale * LOG2_E, *_dropped(p),
        CAUSAL=is_causal, EVEN=_divides(FORWARD, length), WIDTH=width, **FORWARD,
    )  # fmt: skip
    return result, logs


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logs: Tensor,
    seed: Tensor,
    *,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, width = query.shape
    grads = _like(query), _like(query), _like(query)
    strides = _strides(query, key, value, result, grad, grads[0])
    numbers = (heads, length, scale, scale * LOG2_E, *_dropped(p))
    options = {"CAUSAL": is_causal, "WIDTH": width}
    if length <= LONGEST_WHOLE:
        whole = max(16, triton.next_power_of_2(length))
        _backward_whole[(batch * heads,)](
            query, key, value, result, grad, *grads, logs, seed, *strides, *numbers,
            LENGTH=whole, EVEN=whole == length, **options, **WHOLE,
        )  # fmt: skip
        return grads
    shared = torch.empty_like(logs)
    _backward_query[(triton.cdiv(length, BACKWARD_QUERY["ROWS"]), batch * heads)](
        query, key, value, result, grad, grads[0], logs, shared, seed, *strides, *numbers,
        EVEN=_divides(BACKWARD_QUERY, length), **options, **BACKWARD_QUERY,
    )  # fmt: skip
    _backward_key[(triton.cdiv(length, BACKWARD_KEY["COLUMNS"]), batch * heads)](
        query, key, value, grad, grads[1], grads[2], logs, shared, seed, *strides, *numbers,
        EVEN=_divides(BACKWARD_KEY, length), **options, **BACKWARD_KEY,
    )  # fmt: skip
    return grads


def _divides(blocks: dict[str, int], length: int) -> bool:
    """Then nothing needs to be masked."""
    return length % blocks["ROWS"] == 0 and length % blocks["COLUMNS"] == 0


def _like(query: Tensor) -> Tensor:
    batch, heads, length, width = query.shape
    return torch.empty(batch, length, heads, width, dtype=query.dtype, device=query.device).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and row; the last dimension is dense."""
    return [tensor.stride(dim) for tensor in tensors for dim in range(3)]


def _dropped(p: float) -> tuple[int, float]:
    """The hashes that are dropped, those below this, and what the others are multiplied with."""
    threshold = max(2, min(round(p * 2**32), 2**32 - 1))
    return threshold, 2**32 / (2**32 - threshold)


@triton.jit
def _mix(h):  # type: ignore[no-untyped-def]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _row_hashes(seed, head, rows, length):  # type: ignore[no-untyped-def]
    number = (head.to(tl.int64) * length + rows).to(tl.uint32)
    return _mix(_mix(number + seed.to(tl.uint32)) + (seed >> 32).to(tl.uint32))


@triton.jit
def _column_hashes(seed, columns):  # type: ignore[no-untyped-def]
    return _mix(columns.to(tl.uint32) + (seed >> 16).to(tl.uint32)) | 1


@triton.jit
def _factors(row_hashes, column_hashes, threshold, factor):  # type: ignore[no-untyped-def]
    """What the probabilities of a tile are multiplied with: 0 if they are dropped."""
    return tl.where(row_hashes * column_hashes >= threshold.to(tl.uint32), factor, 0.0)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    base, batch, head, batch_stride, head_stride, row_stride, rows, length, WIDTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Rows of one head; those from `length` on are 0."""
    base += batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    places = base + rows[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        return tl.load(places)
    else:
        return tl.load(places, (rows < length)[:, None], 0.0)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    base, batch, head, batch_stride, head_stride, row_stride, rows, length,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, tile,
):  # fmt: skip
    base += batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    places = base + rows[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        tl.store(places, tile.to(base.dtype.element_ty))
    else:
        tl.store(places, tile.to(base.dtype.element_ty), (rows < length)[:, None])


@triton.jit
def _hide(z, rows, columns, length, CAUSAL: tl.constexpr, EVEN: tl.constexpr, other):  # type: ignore[no-untyped-def]
    """A tile with `other` where a row does not see a column; `rows` and `columns` are broadcast."""
    if CAUSAL:
        z = tl.where(rows >= columns, z, other)
    if not EVEN:
        z = tl.where((columns < length) & (rows < length), z, other)
    return z


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, result, logs, seeds,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    result_batch, result_head, result_row,
    num_heads, length, scale, threshold, factor,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    batch, head = which // num_heads, which % num_heads
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    seed = tl.load(seeds)
    row_hashes = _row_hashes(seed, which, rows, length)[:, None]
    q = _load(query, batch, head, query_batch, query_head, query_row, rows, length, WIDTH, EVEN)
    maximum = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    stop = length
    if CAUSAL:
        stop = tl.minimum(length, first + ROWS)
    for start in range(0, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = _load(key, batch, head, key_batch, key_head, key_row, columns, length, WIDTH, EVEN)
        z = _hide(tl.dot(q, tl.trans(k)), rows[:, None], columns[None, :], length, CAUSAL, EVEN, -3.0e38)
        higher = tl.maximum(maximum, tl.max(z, 1) * scale)
        p = tl.exp2(z * scale - higher[:, None])
        fade = tl.exp2(maximum - higher)
        total = total * fade + tl.sum(p, 1)
        p *= _factors(row_hashes, _column_hashes(seed, columns)[None, :], threshold, factor)
        v = _load(value, batch, head, value_batch, value_head, value_row, columns, length, WIDTH, EVEN)
        mean = tl.dot(p.to(v.dtype), v, mean * fade[:, None])
        maximum = higher
    mean = mean / total[:, None]
    _store(result, batch, head, result_batch, result_head, result_row, rows, length, WIDTH, EVEN, mean)
    tl.store(logs + which.to(tl.int64) * length + rows, maximum + tl.log2(total), rows < length)


@triton.jit
def _backward_whole(  # type: ignore[no-untyped-def]
    query, key, value, result, grad, query_grad, key_grad, value_grad, logs, seeds,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    result_batch, result_head, result_row, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    num_heads, length, scale, log_scale, threshold, factor,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """All of a head. Tiles are (keys, queries)."""
    which = tl.program_id(0)
    batch, head = which // num_heads, which % num_heads
    rows = tl.arange(0, LENGTH)
    seed = tl.load(seeds)
    q = _load(query, batch, head, query_batch, query_head, query_row, rows, length, WIDTH, EVEN)
    k = _load(key, batch, head, key_batch, key_head, key_row, rows, length, WIDTH, EVEN)
    log = tl.load(logs + which.to(tl.int64) * length + rows, rows < length, 0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * log_scale - log[None, :])
    p = _hide(p, rows[None, :], rows[:, None], length, CAUSAL, EVEN, 0.0)
    row_hashes = _row_hashes(seed, which, rows, length)[None, :]
    factors = _factors(row_hashes, _column_hashes(seed, rows)[:, None], threshold, factor)
    do = _load(grad, batch, head, grad_batch, grad_head, grad_row, rows, length, WIDTH, EVEN)
    dv = tl.dot((p * factors).to(do.dtype), do)
    _store(value_grad, batch, head, out_batch, out_head, out_row, rows, length, WIDTH, EVEN, dv)
    v = _load(value, batch, head, value_batch, value_head, value_row, rows, length, WIDTH, EVEN)
    o = _load(result, batch, head, result_batch, result_head, result_row, rows, length, WIDTH, EVEN)
    shared = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    ds = (p * (tl.dot(v, tl.trans(do)) * factors - shared[None, :])).to(q.dtype)
    dk = tl.dot(ds, q) * scale
    _store(key_grad, batch, head, out_batch, out_head, out_row, rows, length, WIDTH, EVEN, dk)
    dq = tl.dot(tl.trans(ds), k) * scale
    _store(query_grad, batch, head, out_batch, out_head, out_row, rows, length, WIDTH, EVEN, dq)


@triton.jit
def _backward_query(  # type: ignore[no-untyped-def]
    query, key, value, result, grad, query_grad, logs, shares, seeds,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    result_batch, result_head, result_row, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    num_heads, length, scale, log_scale, threshold, factor,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of queries. Tiles are (queries, keys). Leaves what rows share for the other kernel."""
    which = tl.program_id(1)
    batch, head = which // num_heads, which % num_heads
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    seed = tl.load(seeds)
    row_hashes = _row_hashes(seed, which, rows, length)[:, None]
    q = _load(query, batch, head, query_batch, query_head, query_row, rows, length, WIDTH, EVEN)
    o = _load(result, batch, head, result_batch, result_head, result_row, rows, length, WIDTH, EVEN)
    do = _load(grad, batch, head, grad_batch, grad_head, grad_row, rows, length, WIDTH, EVEN)
    log = tl.load(logs + which.to(tl.int64) * length + rows, rows < length, 0.0)
    shared = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(shares + which.to(tl.int64) * length + rows, shared, rows < length)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    stop = length
    if CAUSAL:
        stop = tl.minimum(length, first + ROWS)
    for start in range(0, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = _load(key, batch, head, key_batch, key_head, key_row, columns, length, WIDTH, EVEN)
        v = _load(value, batch, head, value_batch, value_head, value_row, columns, length, WIDTH, EVEN)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * log_scale - log[:, None])
        p = _hide(p, rows[:, None], columns[None, :], length, CAUSAL, EVEN, 0.0)
        factors = _factors(row_hashes, _column_hashes(seed, columns)[None, :], threshold, factor)
        ds = p * (tl.dot(do, tl.trans(v)) * factors - shared[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    _store(query_grad, batch, head, out_batch, out_head, out_row, rows, length, WIDTH, EVEN, dq * scale)


@triton.jit
def _backward_key(  # type: ignore[no-untyped-def]
    query, key, value, grad, key_grad, value_grad, logs, shares, seeds,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    result_batch, result_head, result_row, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    num_heads, length, scale, log_scale, threshold, factor,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of keys and values, COLUMNS of them. Tiles are (keys, queries)."""
    which = tl.program_id(1)
    batch, head = which // num_heads, which % num_heads
    first = tl.program_id(0) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    seed = tl.load(seeds)
    column_hashes = _column_hashes(seed, columns)[:, None]
    k = _load(key, batch, head, key_batch, key_head, key_row, columns, length, WIDTH, EVEN)
    v = _load(value, batch, head, value_batch, value_head, value_row, columns, length, WIDTH, EVEN)
    dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], tl.float32)
    begin = 0
    if CAUSAL:
        begin = first // ROWS * ROWS
    for start in range(begin, length, ROWS):
        rows = start + tl.arange(0, ROWS)
        q = _load(query, batch, head, query_batch, query_head, query_row, rows, length, WIDTH, EVEN)
        do = _load(grad, batch, head, grad_batch, grad_head, grad_row, rows, length, WIDTH, EVEN)
        log = tl.load(logs + which.to(tl.int64) * length + rows, rows < length, 0.0)
        shared = tl.load(shares + which.to(tl.int64) * length + rows, rows < length, 0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * log_scale - log[None, :])
        p = _hide(p, rows[None, :], columns[:, None], length, CAUSAL, EVEN, 0.0)
        factors = _factors(_row_hashes(seed, which, rows, length)[None, :], column_hashes, threshold, factor)
        dv = tl.dot((p * factors).to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) * factors - shared[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    _store(key_grad, batch, head, out_batch, out_head, out_row, columns, length, WIDTH, EVEN, dk * scale)
    _store(value_grad, batch, head, out_batch, out_head, out_row, columns, length, WIDTH, EVEN, dv)
