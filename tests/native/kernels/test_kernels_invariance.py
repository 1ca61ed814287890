"""Results do not depend on the instruction set, the number of threads, or how a buffer is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.native.kernels.kernel_runs import FORMATS, RULES, empty_states, encode, same_bits, train
from unbounded.errors import PlanError
from unbounded.native import kernels
from unbounded.native.kernels import BLOCK, Pool

GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def levels() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "neon"):
        try:
            Pool(1, simd=name).close()
            found.append(name)
        except PlanError:
            pass
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for key in a:
        assert same_bits(a[key], b[key]), key


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_tail_length_agrees_with_the_scalar_kernel(level: str, format_name: str) -> None:
    format, dtype = FORMATS[format_name]
    generator = torch.Generator().manual_seed(1)
    rules = list(RULES.values())
    with Pool(1, simd=level) as fast, Pool(1, simd="scalar") as scalar:
        for numel in range(301):
            rule, grad_dtype = rules[numel % len(rules)], GRAD_DTYPES[numel % 3]
            master = torch.randn(numel, generator=generator)
            grads = [torch.randn(numel, generator=generator).to(grad_dtype) for _ in range(2)]
            results = [train(rule, format, dtype, master, grads, pool=pool) for pool in (fast, scalar)]
            assert_same(*results)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_every_rule_agrees_with_the_scalar_kernel(
    level: str, name: str, format_name: str, grad_dtype: torch.dtype
) -> None:
    format, dtype = FORMATS[format_name]
    generator = torch.Generator().manual_seed(2)
    master = torch.randn(709, generator=generator)
    grads = [torch.randn(709, generator=generator).to(grad_dtype) for _ in range(4)]
    with Pool(1, simd=level) as fast, Pool(1, simd="scalar") as scalar:
        results = [train(RULES[name], format, dtype, master, grads, pool=p, grad_scale=0.7) for p in (fast, scalar)]
    assert_same(*results)


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_number_of_threads_changes_no_bit(format_name: str) -> None:
    format, dtype = FORMATS[format_name]
    master = torch.randn(600_003)
    grads = [torch.randn(600_003) for _ in range(2)]
    results = []
    for threads in (1, 2, 5):  # which take 65,536, 32,768 and 16,384 elements at a time
        with Pool(threads) as pool:
            results.append(train(RULES["adamw"], format, dtype, master, grads, pool=pool))
            added = torch.empty_like(grads[0])
            sums = [kernels.sum_squares(grads[0], pool), kernels.add(added, *grads, pool)]
            results[-1].update(sums=torch.tensor(sums, dtype=torch.float64), added=added)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_buffer_cut_at_block_boundaries_gives_the_same_bits(format_name: str) -> None:
    format, dtype = FORMATS[format_name]
    numel, cuts = 10 * BLOCK + 5, [0, BLOCK, 4 * BLOCK, 9 * BLOCK, 10 * BLOCK + 5]
    master, grad = torch.randn(numel), torch.randn(numel)
    whole = train(RULES["adamw"], format, dtype, master, [grad])
    states = empty_states(RULES["adamw"], format, dtype, numel)
    weight = encode(master, format, dtype, states)
    specs = kernels.state_arrays("adamw", format, dtype)
    for begin, end in pairwise(cuts):
        part = {
            name: states[name][begin:end] if spec.per_element else states[name][begin // BLOCK : -(-end // BLOCK)]
            for name, spec in specs.items()
        }
        kernels.update(RULES["adamw"], format, weight=weight[begin:end], grad=grad[begin:end], states=part)
    assert_same({**states, "weight": weight}, {**whole})
