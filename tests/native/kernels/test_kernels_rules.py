"""The update rules against torch.optim, and the formats against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.native.kernels.kernel_runs import RULES, empty_states, train
from unbounded.native import kernels
from unbounded.native.kernels import Rule

NUMEL = 1003  # two blocks short of a multiple, with a tail for every vector width


def reference(rule: Rule, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """torch's optimizer for the rule."""
    common = {"lr": rule.lr, "weight_decay": rule.weight_decay, "maximize": rule.maximize}
    if rule.name in ("adam", "adamw"):
        kind = torch.optim.AdamW if rule.name == "adamw" else torch.optim.Adam
        return kind([parameter], betas=(rule.beta1, rule.beta2), eps=rule.eps, **common)
    if rule.name == "adagrad":
        return torch.optim.Adagrad([parameter], lr_decay=rule.lr_decay, eps=rule.eps, **common)
    return torch.optim.SGD(
        [parameter], momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov, **common
    )


def lion_by_its_paper(rule: Rule, weight: Tensor, grads: list[Tensor]) -> Tensor:
    momentum = torch.zeros_like(weight)
    for grad in grads:
        direction = (rule.beta1 * momentum + (1 - rule.beta1) * grad).sign()
        weight = weight - rule.lr * (direction + rule.weight_decay * weight)
        momentum = rule.beta2 * momentum + (1 - rule.beta2) * grad
    return weight


def random_run(steps: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(NUMEL, generator=generator)
    return master, [torch.randn(NUMEL, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("name", [name for name in RULES if name != "lion"])
def test_a_hundred_fp32_steps_agree_with_torch_to_a_millionth(name: str) -> None:
    master, grads = random_run(100)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = reference(RULES[name], parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    ours = train(RULES[name], "fp32", torch.float32, master, grads)
    # relative to the weight, and for a weight that passes through zero relative to its size before
    error = (ours["weight"] - parameter.detach()).abs() / torch.maximum(parameter.detach().abs(), master.abs())
    assert error.max() < 1e-6
    for key, value in optimizer.state[parameter].items():
        if key != "step":
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-7)


def test_lion_follows_its_paper() -> None:
    master, grads = random_run(100)
    expected = lion_by_its_paper(RULES["lion"], master.double(), [grad.double() for grad in grads])
    ours = train(RULES["lion"], "fp32", torch.float32, master, grads)
    torch.testing.assert_close(ours["weight"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_has_the_master_of_fp32_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    master, grads = random_run(20)
    grads = [grad.to(dtype) for grad in grads]
    fp32 = train(RULES[name], "fp32", torch.float32, master, grads, grad_scale=0.3)
    exact = train(RULES[name], "exact", torch.bfloat16, master, grads, grad_scale=0.3)
    assert torch.equal(exact["master"].view(torch.int32), fp32["weight"].view(torch.int32))
    for key in fp32.keys() - {"weight", "master"}:
        assert torch.equal(exact[key], fp32[key])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compact_stays_near_fp32(name: str, dtype: torch.dtype) -> None:
    master, grads = random_run(50)
    fp32 = train(RULES[name], "fp32", torch.float32, master, grads)
    compact = train(RULES[name], "compact", dtype, master, grads)
    moved = (fp32["weight"] - master).norm()
    assert (compact["master"] - fp32["weight"]).norm() < (0.15 if name == "lion" else 0.06) * moved


def test_the_gradient_is_scaled_before_anything_else() -> None:
    master, grads = random_run(3)
    scaled = train(RULES["adamw"], "fp32", torch.float32, master, grads, grad_scale=0.25)
    by_hand = train(RULES["adamw"], "fp32", torch.float32, master, [grad * 0.25 for grad in grads])
    assert torch.equal(scaled["weight"], by_hand["weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_receives_the_new_weights_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    master, grads = random_run(1)
    states = empty_states(RULES["adamw"], "fp32", torch.float32, NUMEL)
    out = torch.empty(NUMEL, dtype=dtype)
    kernels.update(RULES["adamw"], "fp32", weight=master, grad=grads[0], states=states, out=out)
    assert torch.equal(out, master.to(dtype))
