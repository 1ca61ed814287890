"""The GPU's fused update against the host's, for every rule and format."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from unbounded.native import kernels
from unbounded.optim import formats
from unbounded.optim.class_rules import ClassRule
from unbounded.optim.granularity import Granularity
from unbounded.optim.muon import MuonRule
from unbounded.optim.rules import Whole
from unbounded.zero.gradients.gradient_array import device_squares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUMEL = 128 * 37 + 5  # not a multiple of a block, nor of what one program takes


def make_states(rule: kernels.Rule, state_format: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    specs = kernels.state_arrays(rule.name, state_format, dtype, momentum=rule.momentum != 0)
    return {name: torch.zeros(spec.numel(NUMEL), dtype=spec.dtype) for name, spec in specs.items()}


RULES = [
    kernels.Rule("adamw", lr=1e-2, weight_decay=0.1),
    kernels.Rule("adam", lr=1e-2, weight_decay=0.1, maximize=True),
    kernels.Rule("adam", lr=1e-2),
    kernels.Rule("sgd", lr=1e-2, weight_decay=0.1),
    kernels.Rule("sgd", lr=1e-2, momentum=0.9, dampening=0.1),
    kernels.Rule("sgd", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    kernels.Rule("lion", lr=1e-2, weight_decay=0.1),
    kernels.Rule("adagrad", lr=1e-2, lr_decay=0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.momentum}-{rule.weight_decay}")
@pytest.mark.parametrize(
    ("state_format", "dtype"),
    [
        ("fp32", torch.float32),
        ("exact", torch.bfloat16),
        ("compact", torch.bfloat16),
        ("compact", torch.float16),
    ],
)
def test_the_gpu_makes_the_same_bits_as_the_host(rule: kernels.Rule, state_format: str, dtype: torch.dtype) -> None:
    """Gradients of all magnitudes, whose squares are subnormal numbers, zeros, and in the end an infinity and a NaN."""
    from unbounded.optim.device import device_kernels

    torch.manual_seed(0)
    weight = torch.randn(NUMEL).to(dtype)
    states = make_states(rule, state_format, dtype)
    gpu_weight, on_gpu = weight.cuda(), {key: value.cuda() for key, value in states.items()}
    for step in range(1, 21):
        now = dataclasses.replace(rule, step=step)
        grad = (torch.randn(NUMEL) * 10.0 ** torch.randint(-23, 2, (NUMEL,))).to(dtype)
        grad[:200] = 0.0
        if step == 20:
            grad[300], grad[301] = torch.inf, torch.nan
        factor = 1.0 if step == 3 else 0.3
        kernels.update(now, state_format, weight=weight, grad=grad, states=states, grad_scale=factor)
        scale = torch.tensor(factor, device="cuda")
        device_kernels.update(now, state_format, gpu_weight, grad.cuda(), on_gpu, scale, None)
        for name, ours, theirs in [
            ("weight", gpu_weight, weight),
            *((key, on_gpu[key], states[key]) for key in states),
        ]:
            same = ours.cpu().nan_to_num(123.0) == theirs.nan_to_num(123.0)
            if step == 20 and state_format == "compact" and len(same) == NUMEL:
                same[256:384] = True  # all of it decodes to NaN, whatever its bits are
            assert same.all(), f"step {step}: {int((~same).sum())} of {name}, from place {int(same.long().argmin())}"


def test_squares_add_up_as_on_the_host() -> None:
    torch.manual_seed(0)
    parts = [
        (torch.randn(numel) * 10.0 ** torch.randint(-6, 2, (numel,))).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for numel in (1_000_003, 17)
    ]
    for some in (parts, parts[:2], parts[2:4], parts[4:5]):
        for part, square in zip(some, device_squares([part.cuda() for part in some]), strict=True):
            assert float(square) == pytest.approx(kernels.sum_squares(part), rel=1e-13)
    parts[0][5] = torch.inf
    assert float(device_squares([parts[0].cuda()])[0]) == torch.inf


def test_the_compute_copy_is_written_in_the_same_pass() -> None:
    from unbounded.optim.device import device_kernels

    master, grad = torch.randn(NUMEL).cuda(), torch.randn(NUMEL).cuda().half()
    rule = kernels.Rule("adamw", lr=1e-2)
    states = {key: value.cuda() for key, value in make_states(rule, "fp32", torch.float32).items()}
    out = torch.zeros(NUMEL, dtype=torch.float16, device="cuda")
    device_kernels.update(rule, "fp32", master, grad, states, 1.0, out)
    assert torch.equal(out, master.half())


@pytest.mark.parametrize("shape", [(48, 96), (120, 40), (64, 64)], ids=str)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.95, True), (0.3, True), (0.95, False)])
def test_muon_makes_the_bits_of_its_class(shape: tuple[int, int], momentum: float, nesterov: bool) -> None:
    torch.manual_seed(0)
    numel = shape[0] * shape[1]
    given = torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))
    muon = torch.optim.Muon([given], lr=0.02, momentum=momentum, nesterov=nesterov)
    held = {"granularity": Granularity.TENSOR, "dims": frozenset({2})}
    kinds = [kind(muon, muon.param_groups, torch.bfloat16, **held) for kind in (ClassRule, MuonRule)]
    values = torch.randn(numel)
    sides = []
    for rule in kinds:
        arrays = formats.encode_weight(values, torch.bfloat16, rule)
        sides.append({name: array.cuda() for name, array in arrays.items()})
        sides[-1]["momentum_buffer"] = torch.zeros(numel, device="cuda")
    for step in range(1, 6):
        grad = torch.randn(numel).to(torch.bfloat16).cuda()
        for rule, arrays in zip(kinds, sides, strict=True):
            rule.apply(
                rule.resolve(muon.param_groups[0], step),
                {},
                weight=arrays["weight"],
                grad=grad,
                states={name: arrays[name] for name in ("remainder", "momentum_buffer")},
                grad_scale=0.3,
                pool=None,
                whole=Whole(shape, {}),
            )
        for name, array in sides[0].items():
            assert torch.equal(array, sides[1][name]), (name, step)


@pytest.mark.parametrize(("rows", "depth"), [(4096, 1024), (304, 136), (128, 64), (1000, 2048)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_half_of_a_symmetric_product_is_all_of_it(rows: int, depth: int, is_transposed: bool) -> None:
    from unbounded.optim.device.symmetric_products import times_transposed

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the kernel is for Hopper and later")
    torch.manual_seed(0)
    x = torch.randn(depth, rows, device="cuda").to(torch.bfloat16).T
    x = x if is_transposed else x.contiguous()
    product = x.double() @ x.double().T
    gram = times_transposed(x)
    assert torch.equal(gram, gram.T)
    torch.testing.assert_close(gram.double(), product, rtol=2**-8, atol=1e-3 * depth**0.5)
    both = times_transposed(x, factor=0.5, added=gram, added_factor=-2.0)
    torch.testing.assert_close(both.double(), 0.5 * product - 2 * gram.double(), rtol=2**-7, atol=4e-3 * depth**0.5)


@pytest.mark.parametrize("shape", [(4096, 4352), (4352, 4096)], ids=str)
def test_large_matrices_are_orthogonalised_as_by_torch(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    from unbounded.optim.device import symmetric_products

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the kernel is for Hopper and later")
    torch.manual_seed(0)
    matrix = torch.randn(shape, device="cuda").to(torch.bfloat16)
    numbers = (3.4445, -4.775, 2.0315), 5, 1e-7
    wanted = _zeropower_via_newtonschulz(matrix.clone(), *numbers)
    assert symmetric_products.pays(matrix)
    found = symmetric_products.orthogonalise(matrix.clone(), *numbers)
    exact = matrix.double() / matrix.double().norm()
    exact = exact.T if shape[0] > shape[1] else exact
    a, b, c = numbers[0]
    for _ in range(5):
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    exact = exact.T if shape[0] > shape[1] else exact
    errors = [float((one.double() - exact).norm() / exact.norm()) for one in (found, wanted)]
    assert errors[0] < 1.1 * errors[1]
