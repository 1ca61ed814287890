"""The fused update on a GPU: the same rules and formats as the host's core, as one Triton kernel, and the same bits.

Every operation is the host's (`native/kernels`), in its order: a product is fused with a sum where `fma` says so and
nowhere else, roots and quotients are rounded to nearest, and the noise that rounds compact states has the same bits.
So it makes no difference to a training where states are, or when they move.

Imported only if a CUDA tensor is updated. One launch covers one stretch of flat buffers: states are decoded
to fp32 in registers, stepped, and encoded again, so every array crosses the memory bus once each way. The
gradient scale is read from device memory, so clipping never makes the host wait for the norm.

Kernels are made for numbers of elements that 16 divides, and again for others: with the first, whole vectors are read
and written. Without that an update reaches 85 % of the memory's speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from unbounded.native.kernels import Rule
from unbounded.native.states import BLOCK, moments

RULES = {"adamw": 0, "adam": 1, "sgd": 2, "lion": 3, "adagrad": 4}
FORMATS = {"fp32": 0, "exact": 1, "compact": 2}
ROWS = 8  # blocks of elements that a program takes
PLAIN = 2**10  # elements that a program takes of arrays without blocks


def update(
    rule: Rule,
    state_format: str,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    grad_scale: float | torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """One step of `rule` on CUDA buffers, in place, on the current stream; `out` gets the weights in its dtype."""
    numel = weight.numel()
    if numel == 0:
        return
    first, second = (states.get(name) if name else None for name in moments(rule.name, momentum=rule.momentum != 0))
    spare = weight  # a stand-in for arrays that this rule or format does not have; never touched
    first_scale = states.get("exp_avg_scale", states.get("momentum_buffer_scale"))
    second_scale = states.get("exp_avg_sq_scale", states.get("sum_scale"))
    is_bf16 = weight.dtype == torch.bfloat16
    _update[(triton.cdiv(numel, ROWS * BLOCK),)](
        _bits(weight) if is_bf16 else weight,
        grad,
        _or(states.get("remainder"), spare),
        _or(first, spare),
        _or(second, spare),
        _or(first_scale, spare),
        _or(second_scale, spare),
        _or(out, spare),
        _on_device(grad_scale, weight.device),
        numel,
        *_numbers(rule),
        RULE=RULES[rule.name],
        FORMAT=FORMATS[state_format],
        IS_BF16=is_bf16,
        HAS_MOMENTUM=rule.momentum != 0,
        NESTEROV=rule.nesterov,
        FIRST_STEP=rule.step == 1,
        HAS_OUT=out is not None,
        ROWS=ROWS,
        num_warps=4,
        enable_fp_fusion=False,  # results must not depend on what the compiler fuses
    )


def muon_direction(
    grad: torch.Tensor,
    grad_scale: float | torch.Tensor,
    buffer: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool,
    is_first: bool,
) -> torch.Tensor:
    """Moves Muon's `buffer` towards a flat gradient, in place, and returns in bf16 what is to be orthogonalised."""
    direction = torch.empty(grad.numel(), dtype=torch.bfloat16, device=grad.device)
    (toward_from_start, toward), (back_from_start, back) = _blend(1 - momentum), _blend(momentum)
    _muon_direction[(triton.cdiv(grad.numel(), PLAIN),)](
        grad,
        buffer,
        direction,
        _on_device(grad_scale, grad.device),
        grad.numel(),
        toward,
        back,
        TOWARD_FROM_START=toward_from_start,
        BACK_FROM_START=back_from_start,
        NESTEROV=nesterov,
        IS_FIRST=is_first,
        PLAIN=PLAIN,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return direction


def decay_and_add(
    weight: torch.Tensor, remainder: torch.Tensor, direction: torch.Tensor, *, keep: float, alpha: float
) -> None:
    """Weights in the exact format, in place: times `keep`, plus `alpha` times the direction."""
    _decay_and_add[(triton.cdiv(weight.numel(), PLAIN),)](
        _bits(weight),
        remainder,
        direction,
        weight.numel(),
        keep,
        alpha,
        PLAIN=PLAIN,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.reshape(1).to(device=device, dtype=torch.float32)
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def _blend(weight: float) -> tuple[bool, float]:
    """How torch's `lerp` adds up for a weight: from its start, or from its end and with what is left of the weight."""
    exact = torch.tensor(weight, dtype=torch.float32, device="cpu")
    return abs(float(exact)) < 0.5, float(exact if abs(float(exact)) < 0.5 else 1 - exact)


def _or(tensor: torch.Tensor | None, spare: torch.Tensor) -> torch.Tensor:
    return spare if tensor is None else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _numbers(rule: Rule) -> tuple[Any, ...]:
    """What depends only on the step, in double precision, in the order of the kernel's arguments."""
    lr, eps, step_size = rule.lr, rule.eps, 0.0
    keep = 1.0 - rule.lr * rule.weight_decay
    if rule.name in ("adamw", "adam"):
        root = math.sqrt(1.0 - rule.beta2**rule.step)
        step_size = rule.lr * root / (1.0 - rule.beta1**rule.step)
        eps = rule.eps * root
    elif rule.name == "adagrad":
        lr = rule.lr / (1.0 + (rule.step - 1) * rule.lr_decay)
    sign = -1.0 if rule.maximize else 1.0
    return (
        sign, lr, keep, rule.weight_decay, rule.beta1, rule.beta2, 1.0 - rule.beta1, 1.0 - rule.beta2,
        step_size, eps, rule.momentum, 1.0 - rule.dampening, rule.step,
    )  # fmt: skip


@triton.jit
def _scale_bits(highest, headroom: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two that brings a block's largest magnitude just below 2, as bits; 0 for a block of zeros."""
    exponent = (tl.minimum(highest, 0x7F800000) + headroom) >> 23  # a NaN may have any bits above
    bits = tl.maximum(exponent, 1) << 23
    bits = tl.where(exponent >= 254, 0x7FC00000, bits)
    return tl.where(highest == 0, 0, bits)


@triton.jit
def _inverse(scale_bits):  # type: ignore[no-untyped-def]
    """0 if the scale is 0 or a NaN."""
    finite = (scale_bits > 0) & (scale_bits < 0x7F800000)
    return tl.where(finite, 0x7F000000 - scale_bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _salt(step, place):  # type: ignore[no-untyped-def]
    """Random bits for a place in a block at a step."""
    h = (step.to(tl.uint64) * 128 + place.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return (h >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _coupled(decay, w, g):  # type: ignore[no-untyped-def]
    return tl.where(decay != 0, tl.fma(decay, w, g), g)


@triton.jit
def _lerp(start, end, part, FROM_START: tl.constexpr):  # type: ignore[no-untyped-def]
    if FROM_START:
        return tl.fma(part, end - start, start)
    else:
        return tl.fma(start - end, part, end)


@triton.jit(do_not_specialize=["toward", "back"])
def _muon_direction(  # type: ignore[no-untyped-def]
    grad_ptr, buffer_ptr, direction_ptr, scale_ptr, numel, toward, back,
    TOWARD_FROM_START: tl.constexpr, BACK_FROM_START: tl.constexpr,
    NESTEROV: tl.constexpr, IS_FIRST: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * PLAIN + tl.arange(0, PLAIN)
    live = at < numel
    g = tl.load(grad_ptr + at, live, 0.0).to(tl.float32) * tl.load(scale_ptr)
    if IS_FIRST:
        m = tl.zeros_like(g)
    else:
        m = tl.load(buffer_ptr + at, live, 0.0)
    m = _lerp(m, g, toward, TOWARD_FROM_START)
    tl.store(buffer_ptr + at, m, live)
    if NESTEROV:
        m = _lerp(g, m, back, BACK_FROM_START)
    tl.store(direction_ptr + at, m.to(tl.bfloat16), live)


@triton.jit(do_not_specialize=["keep", "alpha"])
def _decay_and_add(  # type: ignore[no-untyped-def]
    weight_ptr, remainder_ptr, direction_ptr, numel, keep, alpha, PLAIN: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * PLAIN + tl.arange(0, PLAIN)
    live = at < numel
    w = _decode_exact(weight_ptr, remainder_ptr, at, live)
    w = tl.fma(alpha, tl.load(direction_ptr + at, live, 0.0).to(tl.float32), w * keep)
    _encode_exact(weight_ptr, remainder_ptr, at, live, w)


@triton.jit
def _bits_of(w):  # type: ignore[no-untyped-def]
    """Of every NaN the same."""
    return tl.where(w != w, -4194304, w.to(tl.int32, bitcast=True))


@triton.jit
def _decode_exact(weight_ptr, remainder_ptr, at, live):  # type: ignore[no-untyped-def]
    high = tl.load(weight_ptr + at, live, 0).to(tl.int32) << 16
    return (high + tl.load(remainder_ptr + at, live, 0).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_exact(weight_ptr, remainder_ptr, at, live, w):  # type: ignore[no-untyped-def]
    bits = _bits_of(w)
    tl.store(weight_ptr + at, ((bits + 0x8000) >> 16).to(tl.int16), live)
    tl.store(remainder_ptr + at, bits.to(tl.int16), live)


@triton.jit(do_not_specialize=["step"])
def _update(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, remainder_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, out_ptr, scale_ptr,
    numel, sign, lr, keep, decay, beta1, beta2, rest1, rest2, step_size, eps, momentum, undamped, step,
    RULE: tl.constexpr, FORMAT: tl.constexpr, IS_BF16: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, FIRST_STEP: tl.constexpr, HAS_OUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, 128)
    at = rows[:, None] * 128 + place[None, :]
    live = at < numel
    live_rows = rows * 128 < numel
    g = tl.load(grad_ptr + at, live, 0.0).to(tl.float32) * tl.load(scale_ptr) * sign
    has_first: tl.constexpr = RULE == 0 or RULE == 1 or RULE == 3 or (RULE == 2 and HAS_MOMENTUM)
    has_second: tl.constexpr = RULE == 0 or RULE == 1 or RULE == 4

    # decode
    if FORMAT == 0:
        w = tl.load(weight_ptr + at, live, 0.0)
    elif FORMAT == 1:
        w = _decode_exact(weight_ptr, remainder_ptr, at, live)
    elif IS_BF16:
        high = tl.load(weight_ptr + at, live, 0).to(tl.int32) << 16
        w = (high + (tl.load(remainder_ptr + at, live, 0).to(tl.int32) << 8)).to(tl.float32, bitcast=True)
    else:
        h = tl.load(weight_ptr + at, live, 0.0).to(tl.float32)
        exponent = tl.maximum(h.to(tl.int32, bitcast=True) & 0x7F800000, 113 << 23)
        w = h + tl.load(remainder_ptr + at, live, 0).to(tl.float32) * (exponent - (18 << 23)).to(
            tl.float32, bitcast=True
        )
    m = w
    v = w
    if has_first:
        if FORMAT == 2:
            high = tl.load(first_ptr + at, live, 0).to(tl.int32) << 19
            z = ((high & -2080899072) | 0x3C000000).to(tl.float32, bitcast=True)
            scale = tl.load(first_scale_ptr + rows, live_rows, 0.0)[:, None]
            offset = (scale * 0.0078125).to(tl.int32, bitcast=True) | (high & -2147483648)  # scales have no sign
            m = tl.fma(z, scale, -offset.to(tl.float32, bitcast=True))
        else:
            m = tl.load(first_ptr + at, live, 0.0)
    if has_second:
        if FORMAT == 2:
            z = ((tl.load(second_ptr + at, live, 0).to(tl.int32) << 19) | 0x38000000).to(tl.float32, bitcast=True)
            scale = tl.load(second_scale_ptr + rows, live_rows, 0.0)[:, None]
            v = tl.fma(z, scale, -(scale * 3.0517578125e-05))
        else:
            v = tl.load(second_ptr + at, live, 0.0)

    # step
    if RULE == 0 or RULE == 1:
        if RULE == 1:
            g = _coupled(decay, w, g)
        m = tl.fma(rest1, g - m, m)
        v = tl.fma(rest2 * g, g, beta2 * v)
        direction = tl.div_rn(m, tl.sqrt_rn(v) + eps)
        if RULE == 0:
            w = w * keep
        w = tl.fma(-step_size, direction, w)
    elif RULE == 2:
        direction = _coupled(decay, w, g)
        if HAS_MOMENTUM:
            if FIRST_STEP:
                m = direction
            else:
                m = tl.fma(undamped, direction, momentum * m)
            if NESTEROV:
                direction = tl.fma(momentum, m, direction)
            else:
                direction = m
        w = tl.fma(-lr, direction, w)
    elif RULE == 3:
        c = tl.fma(rest1, g, beta1 * m)
        direction = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
        m = tl.fma(rest2, g, beta2 * m)
        w = tl.fma(-lr, direction, w * keep)
    else:
        g = _coupled(decay, w, g)
        v = tl.fma(g, g, v)
        direction = tl.div_rn(g, tl.sqrt_rn(v) + eps)
        w = tl.fma(-lr, direction, w)

    # encode
    if FORMAT == 2:  # noise is the low bits of another value of the element, salted
        salt = _salt(step, place)[None, :]
        other = direction
        if has_first:
            other = m
        elif has_second:
            other = v
        weight_noise = other.to(tl.int32, bitcast=True) ^ salt
        other = w
        if RULE == 0 or RULE == 1 or RULE == 4:
            other = direction
        code_noise = (other.to(tl.int32, bitcast=True) ^ salt) & 0x7FFFF
    if FORMAT == 0:
        tl.store(weight_ptr + at, w, live)
        if HAS_OUT:
            tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), live)
    else:
        if FORMAT == 1:
            _encode_exact(weight_ptr, remainder_ptr, at, live, w)
        elif IS_BF16:
            kept = _bits_of(w) + ((weight_noise & 0xFF) | 0x8000)
            tl.store(weight_ptr + at, (kept >> 16).to(tl.int16), live)
            tl.store(remainder_ptr + at, ((kept >> 8) ^ 0x80).to(tl.int8), live)
        else:
            half = w.to(tl.float16)
            h = half.to(tl.float32)
            exponent = tl.maximum(h.to(tl.int32, bitcast=True) & 0x7F800000, 113 << 23)
            rest = (w - h) * ((277 << 23) - exponent.to(tl.int64)).to(tl.int32).to(tl.float32, bitcast=True)
            rest = tl.where(exponent >= 0x7F800000, 0.0, rest)
            kept = ((rest + 4096.0).to(tl.int32) + (weight_noise & 0x1F)) >> 5
            tl.store(weight_ptr + at, half, live)
            tl.store(remainder_ptr + at, (tl.minimum(tl.maximum(kept, 1), 255) - 128).to(tl.int8), live)
    if has_first:
        if FORMAT == 2:
            highest = tl.max(tl.where(live, m.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=1)
            scale = _scale_bits(highest, 0xA0000)
            z = tl.fma(tl.abs(m), _inverse(scale)[:, None], 0.0078125).to(tl.int32, bitcast=True) + code_noise
            code = ((z >> 19) & 0x7F) | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
            tl.store(first_ptr + at, code.to(tl.int8), live)
            tl.store(first_scale_ptr + rows, scale.to(tl.float32, bitcast=True), live_rows)
        else:
            tl.store(first_ptr + at, m, live)
    if has_second:
        if FORMAT == 2:
            highest = tl.max(tl.where(live, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=1)
            scale = _scale_bits(highest, 0x80200)
            z = tl.fma(v, _inverse(scale)[:, None], 3.0517578125e-05).to(tl.int32, bitcast=True) + code_noise
            tl.store(second_ptr + at, tl.maximum((z >> 19) & 0xFF, 1).to(tl.uint8), live)
            tl.store(second_scale_ptr + rows, scale.to(tl.float32, bitcast=True), live_rows)
        else:
            tl.store(second_ptr + at, v, live)
