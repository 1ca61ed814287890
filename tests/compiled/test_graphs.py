"""What replaces operations in the graphs of compiled blocks does what they do. The attention's kernels need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unbounded.compiled.gelu import gelu
from unbounded.compiled.graphs import inductor, rewrite


def compile_block(block: nn.Module) -> tuple[Any, list[Any]]:
    """The block with its operations replaced as on a GPU, and what its graphs call."""
    called: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(graph, "cpu")
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(block, backend=backend), called


class TwoDropouts(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_its_part_and_the_gradient_of_what_it_dropped(p: float) -> None:
    torch.manual_seed(0)
    block, called = compile_block(TwoDropouts(p))
    x = torch.ones(9, 37, 77, requires_grad=True)
    one, two = block(x)
    assert functional.dropout not in called
    for result in (one, two):
        kept = result != 0
        assert float(kept.double().mean()) == pytest.approx(1 - p, abs=0.02)
        torch.testing.assert_close(result, kept / (1 - p))
    both = ((one == 0) & (two == 0)).double().mean()
    assert float(both) == pytest.approx(p * p, abs=0.02)  # each draws its own
    (one.sum() + 2 * two.sum()).backward()
    assert torch.equal(x.grad, one + 2 * two)


def test_what_is_dropped_is_as_if_each_element_had_its_own_number() -> None:
    torch.manual_seed(0)
    block, _ = compile_block(nn.Dropout(0.1))
    rows, columns = 4000, 512
    one = ((block(torch.ones(rows, columns)) != 0).double() - 0.9) / 0.3  # a mean of 0 and a variance of 1
    assert abs(float(one.sum())) / (rows * columns) ** 0.5 < 4
    for side, other in ((one, rows), (one.T, columns)):
        assert float((side.sum(0) / other**0.5).var()) == pytest.approx(1, abs=0.25)
        pairs = (side.T @ side / other**0.5).fill_diagonal_(0)
        assert float(pairs.square().mean()) == pytest.approx(1, abs=0.03)
        assert float(pairs.abs().max()) < 9
    first, second = torch.randint(rows, (2, 500_000)).sort(0).values
    left, right = torch.randint(columns, (2, 500_000)).sort(0).values
    apart = (first != second) & (left != right)
    four = (one[first, left] * one[first, right] * one[second, left] * one[second, right])[apart]
    assert abs(float(four.mean())) * int(apart.sum()) ** 0.5 < 4


def test_dropout_of_other_sizes_is_not_compiled_again() -> None:
    sizes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(graph, "cpu")
        sizes.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    block = torch.compile(nn.Dropout(0.5), backend=backend, dynamic=True)
    for times in (2, 3, 7, 11):
        x = torch.ones(3 * times, 5 * times, 8, requires_grad=True)
        y = block(x)
        y.sum().backward()
        assert torch.equal(x.grad, y)
    assert len(sizes) <= 2  # four sizes


def test_dropout_is_drawn_from_the_generator_of_torch_and_does_nothing_in_evaluation() -> None:
    block, _ = compile_block(TwoDropouts(0.3))
    x, results = torch.randn(8, 8), []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(block(x)[0])
    assert torch.equal(*results)
    assert not torch.equal(block(x)[0], results[0])
    block.eval()
    assert torch.equal(block(x)[0], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_is_exact_to_the_last_bits_of_its_dtype(dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 20_001).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    result, expected = gelu(x), functional.gelu(exact)
    grads = [torch.autograd.grad(value.sum(), leaf)[0] for value, leaf in ((result, x), (expected, exact))]
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=step, atol=1e-6)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=step, atol=2e-6)
    wide = torch.randn(10)
    assert torch.equal(gelu(wide), functional.gelu(wide))
    assert torch.equal(gelu(x, approximate="tanh"), functional.gelu(x, approximate="tanh"))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_a_graph_with_replaced_operations_gives_what_it_gave() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 64)
    block, called = compile_block(Attention())
    torch.testing.assert_close(block(x), Attention()(x))
    assert functional.scaled_dot_product_attention not in called
    assert functional.gelu not in called


def test_kernels_are_not_chosen_by_timing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that chose others would add up in another order, and a resumed run would get other last bits."""
    modes: list[Any] = []

    def compile_fx(graph: torch.fx.GraphModule, _: Any, config_patches: dict[str, Any]) -> Any:
        modes.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    torch.compile(nn.Linear(3, 3), backend=inductor)(torch.ones(2, 3))
    assert modes == [{"deterministic": True}]
    assert torch._inductor.config.deterministic is False  # for everything else
