"""Packs and unpacks frozen weights on a GPU: native/kernels/packed.cpp in Triton, a program for each record.

Imported only if packed weights go to a GPU or come from one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unbounded.planner.models.packed_size import RECORD_BYTES, RECORD_NUMEL

# Of a record: where its list and its exponents begin, how many weights are listed at most, how many have the lower half
# of a byte of exponents, and how many exponents there are.
_NUMBERS = {"LIST": 4, "HEADER": 128, "MOST": 31, "HALF": RECORD_NUMEL // 2, "EXPONENTS": 15}


def pack(weights: torch.Tensor, records: torch.Tensor) -> None:
    """Packs bf16 `weights` into `records`, on the current stream."""
    records.zero_()
    grid = (records.numel() // RECORD_BYTES,)
    _pack[grid](weights.view(torch.int16), records, weights.numel(), RECORD=RECORD_BYTES, **_NUMBERS, num_warps=4)


def unpack(records: torch.Tensor, weights: torch.Tensor, skip: int = 0) -> None:
    """Fills bf16 `weights` with those in `records` after the first `skip` ones, on the current stream."""
    grid = (records.numel() // RECORD_BYTES,)
    _unpack[grid](
        records, weights.view(torch.int16), skip, weights.numel(), RECORD=RECORD_BYTES, **_NUMBERS, num_warps=4
    )


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    weights,
    records,
    numel,
    RECORD: tl.constexpr,
    LIST: tl.constexpr,
    HEADER: tl.constexpr,
    MOST: tl.constexpr,
    HALF: tl.constexpr,
    EXPONENTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    record = records + index * RECORD
    place = tl.arange(0, HALF)
    at = index * (2 * HALF) + place
    first = tl.load(weights + at, mask=at < numel, other=0).to(tl.int32) & 0xFFFF
    second = tl.load(weights + at + HALF, mask=at + HALF < numel, other=0).to(tl.int32) & 0xFFFF
    largest = tl.maximum(tl.max(first & 0x7FFF, 0), tl.max(second & 0x7FFF, 0)) >> 7
    base = tl.maximum(largest, EXPONENTS) - EXPONENTS
    first_exponent, second_exponent = (first >> 7) & 0xFF, (second >> 7) & 0xFF
    first_code = tl.maximum(first_exponent, base) - base
    second_code = tl.maximum(second_exponent, base) - base
    tl.store(record + HEADER + place, (first_code | (second_code << 4)).to(tl.uint8))
    tl.store(record + HEADER + HALF + place, (((first >> 8) & 0x80) | (first & 0x7F)).to(tl.uint8))
    tl.store(record + HEADER + 2 * HALF + place, (((second >> 8) & 0x80) | (second & 0x7F)).to(tl.uint8))
    first_small = ((first_exponent != 0) & (first_exponent <= base)).to(tl.int32)
    second_small = ((second_exponent != 0) & (second_exponent <= base)).to(tl.int32)
    before = tl.sum(first_small, 0)
    listed = before + tl.sum(second_small, 0)
    fits = listed <= MOST
    tl.store(record, base.to(tl.uint8))
    tl.store(record + 1, tl.where(fits, listed, 255).to(tl.uint8))
    if fits & (listed > 0):
        _list(record + LIST, first, place, tl.cumsum(first_small, 0) - 1, first_small == 1)
        _list(record + LIST, second, place + HALF, before + tl.cumsum(second_small, 0) - 1, second_small == 1)


@triton.jit
def _list(entries, bits, position, slot, is_listed):  # type: ignore[no-untyped-def]
    """Writes the places and the bits of those that are listed, the lower bytes first."""
    entry = entries + 4 * slot
    tl.store(entry, (position & 0xFF).to(tl.uint8), mask=is_listed)
    tl.store(entry + 1, (position >> 8).to(tl.uint8), mask=is_listed)
    tl.store(entry + 2, (bits & 0xFF).to(tl.uint8), mask=is_listed)
    tl.store(entry + 3, (bits >> 8).to(tl.uint8), mask=is_listed)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    records,
    weights,
    skip,
    numel,
    RECORD: tl.constexpr,
    LIST: tl.constexpr,
    HEADER: tl.constexpr,
    MOST: tl.constexpr,
    HALF: tl.constexpr,
    EXPONENTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    record = records + index * RECORD
    base = tl.load(record).to(tl.int32)
    listed = tl.load(record + 1).to(tl.int32)
    listed = tl.where(listed > MOST, 0, listed)
    place = tl.arange(0, HALF)
    pairs = tl.load(record + HEADER + place).to(tl.int32)
    for half in tl.static_range(2):
        low = tl.load(record + HEADER + (1 + half) * HALF + place).to(tl.int32)
        code = (pairs >> (4 * half)) & EXPONENTS
        exponent = tl.where(code == 0, 0, code + base)
        bits = ((low & 0x80) << 8) | (exponent << 7) | (low & 0x7F)
        position = place + half * HALF
        for entry in range(listed):
            at = record + LIST + 4 * entry
            where = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
            value = tl.load(at + 2).to(tl.int32) | (tl.load(at + 3).to(tl.int32) << 8)
            bits = tl.where(position == where, value, bits)
        target = index * (2 * HALF) + position - skip
        tl.store(weights + target, bits.to(tl.int16), mask=(target >= 0) & (target < numel))
