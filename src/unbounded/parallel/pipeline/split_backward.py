"""Backwards in two halves: the gradients of inputs now, those of weights later.

Inside `Deferring`, every product with a weight is computed by a function whose backward gives the gradient of its input
at once and sets the other half aside. `run` computes what was set aside and adds it to the weights, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class WeightWork:
    """What one micro-batch has left to do for its weights."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._weights: dict[int, torch.Tensor] = {}

    def note(self, weight: torch.Tensor) -> int:
        """Keeps the tensor of the graph that the gradient is for."""
        self._weights[id(weight)] = weight
        return id(weight)

    def put(self, key: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """The gradient of a weight will be `left`^T `right`."""
        self._waiting.append((self._weights[key], left, right))

    def run(self) -> None:
        """Computes all gradients that wait, and adds them to those of their weights."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for weight, left, right in self._waiting:
            gradient = left.t() @ right
            known = found.get(id(weight))
            found[id(weight)] = (weight, gradient if known is None else known[1].add_(gradient))
        self._waiting.clear()
        self._weights.clear()
        if found:
            torch.autograd.backward([weight for weight, _ in found.values()], [g for _, g in found.values()])


class _LinearProduct(torch.autograd.Function):
    """x W^T, or x W if the weight is stored as (inputs, outputs)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, work: WeightWork, key: int, flip: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.work, ctx.key, ctx.flip = work, key, flip
        return x @ weight if flip else nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        flat, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        left, right = (inputs, flat) if ctx.flip else (flat, inputs)
        ctx.work.put(ctx.key, left, right)
        return gradient @ (weight.t() if ctx.flip else weight), None, None, None, None


class Deferring(TorchFunctionMode):
    """Inside, products with weights that need a gradient set half of their backward aside."""

    def __init__(self, work: WeightWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and not kwargs and self._fits(args[0], args[1]):
            x, weight, *bias = args
            product = _LinearProduct.apply(x, weight, self.work, self.work.note(weight), False)
            return product if not bias or bias[0] is None else product + bias[0]
        if func is torch.addmm and not kwargs and self._fits(args[1], args[2]):
            bias, x, weight = args
            return _LinearProduct.apply(x, weight, self.work, self.work.note(weight), True) + bias
        return func(*args, **kwargs)

    @staticmethod
    def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return weight.dim() == 2 and weight.requires_grad and x.requires_grad and torch.is_grad_enabled()
