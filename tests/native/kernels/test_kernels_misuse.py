"""Bad input to the kernels and pools: an error with what was found and what to do, and nothing touched."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from tests.native.kernels.kernel_runs import RULES, empty_states, train
from unbounded.errors import PlanError, StateError
from unbounded.native import kernels
from unbounded.native.kernels import Pool, Rule

RULE = RULES["adamw"]


def arguments(**changes: object) -> dict[str, object]:
    states = empty_states(RULE, "exact", torch.bfloat16, 10)
    weight, grad = torch.zeros(10, dtype=torch.bfloat16), torch.zeros(10)
    return {"weight": weight, "grad": grad, "states": states, **changes}


def without(name: str) -> dict[str, Tensor]:
    states = empty_states(RULE, "exact", torch.bfloat16, 10)
    del states[name]
    return states


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight": torch.zeros(10)}, 'format "exact" keeps weights in torch.bfloat16, not torch.float32'),
        ({"grad": torch.zeros(9)}, "grad has 9 elements. It must have 10."),
        ({"grad": torch.zeros(10, dtype=torch.float64)}, "grad has dtype torch.float64. It must be torch.float32 or"),
        ({"grad": torch.zeros(20)[::2]}, "grad of shape \\(10,\\) is not contiguous"),
        ({"grad": torch.zeros(10, device="meta")}, "grad is on meta. Host kernels need tensors on the CPU."),
        (
            {"states": without("remainder")},
            'the state "remainder" is missing. adamw in format exact needs remainder, exp_avg',
        ),
        ({"out": torch.zeros(10, dtype=torch.bfloat16)}, 'out was given in format "exact"'),
        (
            {"states": {**without("remainder"), "remainder": torch.zeros(10, dtype=torch.int8)}},
            'state "remainder" has dtype torch.int8',
        ),
        (
            {"states": None},
            "no states were given. Pass them, or a source and UpdatePart.WEIGHTS for weights",
        ),
    ],
)
def test_bad_arguments_of_an_update_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        kernels.update(RULE, "exact", **arguments(**changes))


@pytest.mark.parametrize(
    ("rule", "format"),
    [
        (Rule("adamw", lr=1.0), "compact"),
        (Rule("adam", lr=1.0, weight_decay=0.5), "exact"),
        (Rule("sgd", lr=1.0), "exact"),
    ],
)
def test_an_update_that_has_no_parts_is_refused_in_parts(rule: Rule, format: str) -> None:
    states = {
        name: torch.zeros(spec.numel(10), dtype=spec.dtype)
        for name, spec in kernels.state_arrays(rule.name, format, torch.bfloat16, momentum=False).items()
    }
    weight = torch.ones(10, dtype=torch.bfloat16)
    for part in (kernels.UpdatePart.WEIGHTS, kernels.UpdatePart.MOMENTS):
        text = (
            rf"{part} was given for {rule.name} with weight_decay={rule.weight_decay} in format {format}, which is one"
        )
        with pytest.raises(PlanError, match=text):
            kernels.update(rule, format, weight=weight, grad=torch.zeros(10), states=states, part=part)
    assert torch.equal(weight, torch.ones(10, dtype=torch.bfloat16))


def test_a_compact_scale_of_the_wrong_size_is_named() -> None:
    states = empty_states(RULE, "compact", torch.bfloat16, 129)
    states["exp_avg_scale"] = torch.zeros(1)
    weight = torch.zeros(129, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r'state "exp_avg_scale" has 1 elements\. It must have 2\.'):
        kernels.update(RULE, "compact", weight=weight, grad=torch.zeros(129), states=states)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Rule("rmsprop", lr=1.0), 'the rule "rmsprop" is unknown. Choose one of adamw'),
        (lambda: Rule("adam", lr=1.0, step=0), "step 0 was given to adam. Steps count from 1."),
        (lambda: kernels.state_arrays("adam", "tiny", torch.float32), 'the state format "tiny" is unknown'),
        (lambda: kernels.state_arrays("rprop", "fp32", torch.float32), 'the rule "rprop" is unknown'),
        (lambda: Pool(0), "a pool of 0 threads cannot work. Ask for at least 1."),
        (lambda: Pool(1, simd="mmx"), 'the instruction set "mmx" is not available'),
        (lambda: kernels.convert(torch.zeros(3), torch.zeros(4)), "dst has 4 elements. It must have 3."),
        (lambda: kernels.sum_squares(torch.zeros(3, dtype=torch.int32)), "tensor has dtype torch.int32"),
        (lambda: kernels.add(torch.zeros(3), torch.zeros(4), torch.zeros(3)), "held has 4 elements. It must have 3."),
        (lambda: kernels.copy(torch.zeros(3), torch.zeros(3).half()), "dst has dtype torch.float16"),
    ],
)
def test_bad_values_are_named(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=text):
        make()


def test_the_variable_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBOUNDED_SIMD", "scalar")
    assert kernels.simd() == "scalar"
    with Pool(1) as pool:
        assert pool.simd == "scalar"
    monkeypatch.setenv("UNBOUNDED_SIMD", "altivec")
    with pytest.raises(PlanError, match="altivec"):
        kernels.simd()


def test_a_closed_pool_refuses_work() -> None:
    pool = Pool(2)
    pool.close()
    pool.close()
    with pytest.raises(StateError, match="the pool is closed"):
        kernels.sum_squares(torch.zeros(3), pool)


def test_closing_waits_for_the_work_in_flight() -> None:
    pool = Pool(2)
    done: list[float] = []
    with pool.borrow():
        closer = threading.Thread(target=lambda: (pool.close(), done.append(1.0)))
        closer.start()
        closer.join(0.05)
        assert not done
    closer.join()
    assert done


def test_many_python_threads_share_one_pool() -> None:
    values = [torch.full((50_000,), float(i)) for i in range(6)]
    sums = [0.0] * 6
    with Pool(3) as pool:

        def work(i: int) -> None:
            for _ in range(20):
                sums[i] = kernels.sum_squares(values[i], pool)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert sums == [50_000.0 * i * i for i in range(6)]


def test_flushing_denormals_in_torch_changes_nothing_here() -> None:
    master, grads = torch.randn(50_000), [torch.randn(50_000) * 1e-19]
    before = train(RULES["adamw"], "fp32", torch.float32, master, grads)
    torch.set_flush_denormal(True)
    try:
        after = train(RULES["adamw"], "fp32", torch.float32, master, grads)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])
    assert (before["exp_avg_sq"] > 0).any()
