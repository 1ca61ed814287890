"""The GPU's fused update against the host's, for every rule and format."""

from __future__ import annotations

import pytest
import torch

from unbounded.native import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUMEL = 128 * 37 + 5  # not a multiple of a block, nor of what one program takes


def make_states(rule: kernels.Rule, state_format: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    specs = kernels.state_arrays(rule.name, state_format, dtype, momentum=rule.momentum != 0)
    return {name: torch.zeros(spec.numel(NUMEL), dtype=spec.dtype) for name, spec in specs.items()}


def master_of(state_format: str, weight: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
    if state_format == "fp32":
        return weight
    master = torch.empty(NUMEL)
    (kernels.join if state_format == "exact" else kernels.decode_weight)(weight, states["remainder"], master)
    return master


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adagrad"])
@pytest.mark.parametrize(
    ("state_format", "dtype"),
    [
        ("fp32", torch.float32),
        ("exact", torch.bfloat16),
        ("compact", torch.bfloat16),
        ("compact", torch.float16),
    ],
)
def test_the_gpu_agrees_with_the_host(name: str, state_format: str, dtype: torch.dtype) -> None:
    from unbounded.optim import device_kernels

    torch.manual_seed(0)
    weight = torch.randn(NUMEL).to(dtype)
    start = weight.float()
    states: dict[str, torch.Tensor] = {}
    on_gpu: dict[str, torch.Tensor] = {}
    gpu_weight = weight.cuda()
    for step in range(1, 21):
        # No decay where it is added to the gradient: a sum that cancels to almost nothing is then divided by itself.
        decay = 0.0 if name in ("adam", "adagrad") else 0.1
        rule = kernels.Rule(name, lr=1e-2, momentum=0.9 if name == "sgd" else 0.0, weight_decay=decay, step=step)
        if step == 1:
            states = make_states(rule, state_format, dtype)
            on_gpu = {key: value.cuda() for key, value in states.items()}
        grad = torch.randn(NUMEL).to(dtype)
        kernels.update(rule, state_format, weight=weight, grad=grad, states=states, grad_scale=0.5)
        device_kernels.update(rule, state_format, gpu_weight, grad.cuda(), on_gpu, torch.tensor(0.5).cuda(), None)
    ours = master_of(state_format, gpu_weight.cpu(), {key: value.cpu() for key, value in on_gpu.items()})
    theirs = master_of(state_format, weight, states)
    if state_format == "compact":  # rounded stochastically, with other noise: equal on average
        moved = (theirs - start).norm()
        assert (ours - theirs).norm() < 0.1 * moved
        assert abs(float((ours - theirs).mean())) < 0.01 * float((theirs - start).abs().mean())
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_compute_copy_is_written_in_the_same_pass() -> None:
    from unbounded.optim import device_kernels

    master, grad = torch.randn(NUMEL).cuda(), torch.randn(NUMEL).cuda().half()
    rule = kernels.Rule("adamw", lr=1e-2)
    states = {key: value.cuda() for key, value in make_states(rule, "fp32", torch.float32).items()}
    out = torch.zeros(NUMEL, dtype=torch.float16, device="cuda")
    device_kernels.update(rule, "fp32", master, grad, states, 1.0, out)
    assert torch.equal(out, master.half())
