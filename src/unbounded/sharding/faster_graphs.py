"""What the compiler leaves slow on a GPU, put into its graphs in a form that it makes fast.

`inductor` is torch's own backend behind a look at the graph of a block:

- **Dropout.** The compiler draws a random number per element in the kernel that uses it, which takes longer than the
  memory that the kernel moves. Here bits are drawn eight elements at a time, and a kernel reads 16 of them per element.
- **GELU** of 16-bit values. The error function takes longer than the memory, too. Here it is a polynomial and one
  exponential, which the backward has in common with the density.

Both are what the graph says, to the last bits of its dtype; which elements are dropped is random, as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

_BITS = 16  # random bits per element that may be dropped
_HALF = 2 ** (_BITS - 1)
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7.
_ERF_SLOPE = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend for `torch.compile`."""
    rewrite(graph)
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)  # type: ignore[no-any-return]


def rewrite(graph: fx.GraphModule, device_type: str = "cuda") -> None:
    """Replaces operations on such a device, in place."""
    for place, node in enumerate(graph.graph.nodes):
        value = node.meta.get("example_value")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.device.type != device_type:
            continue
        if node.target is nn.functional.dropout:
            node.target, node.kwargs = dropout, {**node.kwargs, "place": place}
        elif node.target is nn.functional.gelu:
            node.target = gelu
    graph.recompile()


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, place: int) -> Tensor:
    dropped = round(p * 2**_BITS)
    if inplace or not training or not 0 < dropped < 2**_BITS:
        return nn.functional.dropout(input, p, training, inplace)
    kept = random_bits(input.shape, place, input.device) >= dropped - _HALF
    return torch.where(kept, input * (2**_BITS / (2**_BITS - dropped)), 0.0)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate != "none" or input.dtype not in (torch.bfloat16, torch.float16):
        return nn.functional.gelu(input, approximate=approximate)
    return _Gelu.apply(input)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("unbounded::random_bits", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def random_bits(size: Sequence[int], place: int, device: torch.device) -> Tensor:
    """Random numbers of 16 bits, of the device's generator.

    Those of every place in a graph are their own: the compiler takes two calls with the same arguments for one.
    """
    numel = math.prod(size)
    drawn = torch.empty((numel + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    return drawn.view(torch.int16)[:numel].view(size)


@random_bits.register_fake
def _(size: Sequence[int], place: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int16, device=device)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input)
        x = input.float()
        return (x * _distribution(x)[0]).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (input,) = ctx.saved_tensors
        x = input.float()
        below, density = _distribution(x)
        return (grad.float() * (below + x * density)).to(input.dtype)


def _distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution: how much of it is below x, and its density there."""
    exponential = torch.exp(-0.5 * x * x)
    near = 1 / (1 + x.abs() * (_ERF_SLOPE / math.sqrt(2)))
    polynomial = torch.zeros_like(x)
    for factor in reversed(_ERF):
        polynomial = (polynomial + factor) * near
    tail = 0.5 * polynomial * exponential
    return torch.where(x < 0, tail, 1 - tail), exponential / math.sqrt(2 * math.pi)
