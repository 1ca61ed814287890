"""Conversions and state formats against references written in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unbounded.native import kernels
from unbounded.native.kernels import BLOCK
from unbounded.optim import formats
from unbounded.optim.rules import NativeRule

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]


def any_floats(numel: int) -> Tensor:
    """Random bit patterns: denormals, infinities and NaN are among them."""
    bits = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64, generator=torch.Generator().manual_seed(3))
    return bits.to(torch.int32).view(torch.float32)


def reference_moment(values: Tensor, *, binades: int, signed: bool) -> Tensor:
    """One block encoded in 8 bits as the format defines it: in float64, to nearest."""
    offset = 2.0 ** (1 - binades)
    step_up = 1.9375 - 2 * offset  # a larger mantissa takes the next power of two
    mantissa, exponent = torch.frexp(values.abs().max())
    scale = 2.0 ** (int(exponent) - (0 if float(mantissa) * 2 >= step_up else 1))
    z = values.abs().double() / scale + offset
    quantum = 2.0 ** (z.log2().floor() - 4)
    z = (z / quantum + 0.5).floor() * quantum
    if not signed:
        z = z.clamp(min=offset * 17 / 16)
    return ((z - offset) * scale).float() * values.sign() if signed else ((z - offset) * scale).float()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversion_rounds_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    values = any_floats(5003).to(source)
    out = torch.empty(5003, dtype=target)
    kernels.convert(values, out)
    expected = values.to(target)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("numel", [7, 70_003])  # fewer than the partial sums; several chunks and a tail
def test_addition_is_in_fp32_and_gives_the_squares_of_what_it_wrote(
    source: torch.dtype, target: torch.dtype, numel: int
) -> None:
    values, total = torch.randn(numel).to(source), torch.randn(numel).to(target)
    for held in (total.to(source), total):
        out = torch.empty(numel, dtype=target) if held is not total else total
        expected = (held.float() + values.float()).to(target)
        squares = kernels.add(out, held, values)
        assert torch.equal(out, expected)
        assert squares == kernels.sum_squares(out) > 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_of_squares_is_that_of_float64(dtype: torch.dtype) -> None:
    values = torch.randn(70_001).to(dtype)
    assert kernels.sum_squares(values) == pytest.approx(values.double().square().sum().item(), rel=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_shows_in_the_sum_of_squares(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 15, 16, 70_000):  # the first lane, the last one, the next group, the tail
        values = torch.ones(70_001, dtype=dtype)
        values[place] = bad
        assert not math.isfinite(kernels.sum_squares(values))


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0x7FFF, -0x80, -0x40, -1])
def test_a_gradient_that_is_not_finite_shows_in_compact_moments(bits: int) -> None:
    """An infinity, and NaN with all kinds of bits: a block with one decodes to NaN."""
    rule, grad = kernels.Rule("adamw", lr=1e-2), torch.randn(3 * BLOCK).to(torch.bfloat16)
    grad.view(torch.int16)[BLOCK + 5] = bits
    specs = kernels.state_arrays("adamw", "compact", torch.bfloat16, momentum=False)
    states = {name: torch.zeros(spec.numel(grad.numel()), dtype=spec.dtype) for name, spec in specs.items()}
    kernels.update(rule, "compact", weight=torch.zeros_like(grad), grad=grad, states=states)
    for scale in ("exp_avg_scale", "exp_avg_sq_scale"):
        assert states[scale].isnan().tolist() == [False, True, False]


def test_an_fp32_sum_that_overflows_fp32_stays_finite() -> None:
    assert kernels.sum_squares(torch.full((100,), 3e38)) == pytest.approx(9e78, rel=1e-6)


def test_split_and_join_keep_every_finite_and_infinite_master() -> None:
    master = any_floats(200_000)
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder, back = torch.empty(master.shape, dtype=torch.int16), torch.empty_like(master)
    kernels.split(master, weight, remainder)
    kernels.join(weight, remainder, back)
    known = ~master.isnan()
    assert torch.equal(back[known].view(torch.int32), master[known].view(torch.int32))
    assert back[~known].isnan().all()
    assert weight[~known].isnan().all()
    ties_away = (master[known].view(torch.int32).to(torch.int64) + 0x8000) >> 16
    assert torch.equal(weight[known].view(torch.int16), ties_away.to(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_compact_weight_is_the_rounded_master_and_its_remainder(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    master = torch.randn(10_007, generator=generator) * torch.exp2(torch.arange(10_007) % 24 - 16)
    master[0] = torch.tensor(0x41957F80, dtype=torch.int32).view(torch.float32)  # the remainder rounds to half a place
    weight, remainder = torch.empty(master.shape, dtype=dtype), torch.empty(master.shape, dtype=torch.int8)
    back = torch.empty_like(master)
    kernels.encode_weight(master, weight, remainder)
    kernels.decode_weight(weight, remainder, back)
    bits = 16 if dtype == torch.bfloat16 else 18
    assert (back - master).abs().le(master.abs() * 2.0**-bits + 2.0**-32).all()
    # 257/255 at the most, where rounding the remainder takes the weight to the place on the other side.
    assert (weight.float() - master).abs().le((master.to(dtype).float() - master).abs() * 1.00785).all()


@pytest.mark.parametrize(("codes_dtype", "binades"), [(torch.int8, 8), (torch.uint8, 16)])
def test_moment_codes_follow_their_definition(codes_dtype: torch.dtype, binades: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for shift in range(-60, 61, 7):
        values = torch.randn(BLOCK, generator=generator) * 2.0**shift
        values = values if codes_dtype == torch.int8 else values.square()
        codes, scale = torch.empty(BLOCK, dtype=codes_dtype), torch.empty(1)
        back = torch.empty(BLOCK)
        kernels.encode_moment(values, codes, scale)
        kernels.decode_moment(codes, scale, back)
        assert torch.equal(back, reference_moment(values, binades=binades, signed=codes_dtype == torch.int8))


def test_a_second_moment_is_zero_only_where_its_block_is() -> None:
    values = torch.zeros(2 * BLOCK)
    values[3], values[5] = 1.0, 1e-30
    codes, scale, back = torch.empty(2 * BLOCK, dtype=torch.uint8), torch.empty(2), torch.empty(2 * BLOCK)
    kernels.encode_moment(values, codes, scale)
    kernels.decode_moment(codes, scale, back)
    assert (back[:BLOCK] > 0).all()
    assert (back[BLOCK:] == 0).all()


def test_a_copy_reaches_every_byte() -> None:
    for numel in (0, 1, 15, 16, 17, 300_001):
        source = torch.randint(0, 255, (numel,), dtype=torch.uint8)
        target = torch.full((numel,), 7, dtype=torch.uint8)
        kernels.copy(source, target)
        assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("format", "dtype", "total"), [("exact", torch.bfloat16, 12), ("compact", torch.bfloat16, 5.0625)]
)
def test_bytes_of_a_parameter_are_as_promised(format: str, dtype: torch.dtype, total: float) -> None:
    numel = 128_000
    states = kernels.state_arrays("adamw", format, dtype).values()
    assert sum(spec.num_bytes(numel) for spec in states) + 2 * numel == total * numel


@pytest.mark.parametrize(
    ("dtype", "state_format"), [(torch.bfloat16, "exact"), (torch.bfloat16, "compact"), (torch.float16, "compact")]
)
def test_values_that_have_the_weights_dtype_are_encoded_as_from_fp32(dtype: torch.dtype, state_format: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    rule = NativeRule("AdamW", [{"lr": 1e-3, "betas": (0.9, 0.99)}], dtype, state_format)
    found, expected = (formats.encode_weight(values, dtype, rule) for values in (every, every.float()))
    assert torch.equal(found["weight"].view(torch.int16), expected["weight"].view(torch.int16))
    assert torch.equal(found["remainder"], expected["remainder"])
