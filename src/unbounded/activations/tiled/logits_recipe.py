"""How deferred logits are made, row by row: products of linear layers, and what is done to each element afterwards.

A recipe is a tree. Its leaves are `Product`s; an `Application` applies a function to recipes, numbers and tensors that
are the same for all rows. Most are one product with a scale, a cap and casts (`read_head`), which the loss's own
kernels do; any other, such as a head under LoRA, is computed a tile at a time under autograd (`RecipeProjection`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Product:
    """`linear(inputs)`: inputs are (..., width)."""

    linear: nn.Linear
    inputs: torch.Tensor


@dataclass(frozen=True, eq=False)
class Application:
    """`function(*operands, **options)`; an operand is a recipe, a number, or a tensor for all rows."""

    function: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]
    options: Mapping[str, Any]


LogitsRecipe = Product | Application


def products_of(recipe: LogitsRecipe) -> Iterator[Product]:
    if isinstance(recipe, Product):
        yield recipe
    else:
        for operand in recipe.operands:
            if isinstance(operand, (Product, Application)):
                yield from products_of(operand)


def map_inputs(recipe: LogitsRecipe, change: Callable[[torch.Tensor], torch.Tensor]) -> LogitsRecipe:
    """The same recipe for other rows."""
    if isinstance(recipe, Product):
        return replace(recipe, inputs=change(recipe.inputs))
    return replace(
        recipe,
        operands=tuple(
            map_inputs(operand, change) if isinstance(operand, (Product, Application)) else operand
            for operand in recipe.operands
        ),
    )


class Head(NamedTuple):
    """One product, scaled and capped."""

    product: Product
    scale: float
    softcap: float | None


def read_head(recipe: LogitsRecipe) -> Head | None:
    """The recipe as scale and cap of one product, if it is that."""
    steps: list[tuple[str, float]] = []
    while isinstance(recipe, Application):
        step = _read_step(recipe)
        if step is None:
            return None
        if step[0] != "cast":
            steps.insert(0, step)
        recipe = recipe.operands[0]
    scale = 1.0
    while steps and steps[0][0] == "times" and steps[1:2] != [("tanh", 0.0)]:
        scale *= steps.pop(0)[1]
    if not steps:
        return Head(recipe, scale, None)
    if [name for name, _ in steps] != ["times", "tanh", "times"]:
        return None
    cap = steps[2][1]
    return Head(recipe, scale * steps[0][1] * cap, cap) if cap > 0.0 else None


def _read_step(step: Application) -> tuple[str, float] | None:
    """A step of one recipe with numbers: a cast, a tanh, or a factor."""
    if not isinstance(step.operands[0], (Product, Application)):
        return None
    name = step.function.__name__
    if name in CASTS:
        return "cast", 0.0
    if name == "tanh":
        return "tanh", 0.0
    number = step.operands[1] if len(step.operands) == 2 and not step.options else None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if name in TIMES:
        return "times", float(number)
    return ("times", 1.0 / number) if name in OVER and number else None


CASTS = frozenset({"float", "double", "half", "bfloat16", "to"})
TIMES = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
OVER = frozenset({"div", "divide", "true_divide", "__truediv__", "__div__"})
PLUS = frozenset({"add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__", "rsub"})
ELEMENTWISE = CASTS | TIMES | OVER | PLUS | {"tanh"}


class RecipeProjection:
    """Any recipe as a projection of the tiled loss. `weights` are weight and bias of each of its layers, in order."""

    def __init__(self, recipe: LogitsRecipe, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        self._recipe = recipe
        inputs = [product.inputs.reshape(-1, product.inputs.shape[-1]) for product in products_of(recipe)]
        values = [value for layer in weights for value in layer] + list(_tensors_of(recipe))
        self._has_bias = [len(layer) == 2 for layer in weights]
        self._num_inputs, self.num_rows = len(inputs), inputs[0].shape[0]
        self.num_classes = weights[0][0].shape[0]
        self.tensors = [inputs[0], *values, *inputs[1:]]

    def begin(self, wanted: Sequence[bool], num_tiles: int) -> None:
        self._wanted = wanted
        num_values = len(self.tensors) - self._num_inputs
        self._is_row = [not 1 <= index <= num_values for index in range(len(self.tensors))]
        self._sums = [
            None
            if not is_wanted
            else torch.empty_like(tensor)
            if is_row
            else torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            for tensor, is_wanted, is_row in zip(self.tensors, wanted, self._is_row, strict=True)
        ]

    def forward(self, start: int, stop: int) -> torch.Tensor:
        self._leaves = [
            (tensor[start:stop] if is_row else tensor).detach().requires_grad_(is_wanted)
            for tensor, is_row, is_wanted in zip(self.tensors, self._is_row, self._wanted, strict=True)
        ]
        num_values = len(self.tensors) - self._num_inputs
        with torch.enable_grad():
            first, values, rest = self._leaves[0], self._leaves[1 : 1 + num_values], self._leaves[1 + num_values :]
            self._logits = self._evaluate(self._recipe, iter([first, *rest]), _Values(values, self._has_bias))
        return self._logits.detach().clone()

    def _evaluate(self, recipe: LogitsRecipe, inputs: Iterator[torch.Tensor], values: _Values) -> torch.Tensor:
        if isinstance(recipe, Product):
            return nn.functional.linear(next(inputs), *values.next_layer())
        operands = [
            self._evaluate(operand, inputs, values)
            if isinstance(operand, (Product, Application))
            else values.next_tensor()
            if isinstance(operand, torch.Tensor)
            else operand
            for operand in recipe.operands
        ]
        return recipe.function(*operands, **recipe.options)

    def backward(self, start: int, stop: int, gradient: torch.Tensor) -> None:
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(self._logits, wanted, gradient))
        for leaf, total, is_row in zip(self._leaves, self._sums, self._is_row, strict=True):
            if leaf.requires_grad and total is not None:
                part = next(found)
                total[start:stop].copy_(part) if is_row else total.add_(part)
        del self._leaves, self._logits

    def gradients(self) -> list[torch.Tensor | None]:
        return self._sums


class _Values:
    """Hands out the layers' values in the order of the products, and the tensors of steps in theirs."""

    def __init__(self, values: Sequence[torch.Tensor], has_bias: Sequence[bool]) -> None:
        self._layers, values = iter(has_bias), list(values)
        num_layers = len(has_bias) + sum(has_bias)
        self._values, self._tensors = iter(values[:num_layers]), iter(values[num_layers:])

    def next_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_bias = next(self._layers)
        return next(self._values), next(self._values) if has_bias else None

    def next_tensor(self) -> torch.Tensor:
        return next(self._tensors)


def _tensors_of(recipe: LogitsRecipe) -> Iterator[torch.Tensor]:
    """The tensors of steps, in the order in which `_evaluate` needs them."""
    if isinstance(recipe, Application):
        for operand in recipe.operands:
            if isinstance(operand, (Product, Application)):
                yield from _tensors_of(operand)
            elif isinstance(operand, torch.Tensor):
                yield operand
