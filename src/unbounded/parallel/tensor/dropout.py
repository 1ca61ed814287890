"""Dropout that drops what the one-rank model drops.

If every rank holds the same activations, each draws the same mask from the same random state. If ranks hold parts (of
the heads, of the features, of the sequence), each draws the mask of the whole and takes its part of it, so that random
states advance alike and results are those of one rank. Function calls inside attention code are found by a torch
function mode, which is entered only by modules that drop anything in training. On CUDA, fused attention kernels draw
numbers themselves: there each rank draws its own, and the random state is advanced alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unbounded.parallel.attachments import Detach, replace_forward
from unbounded.parallel.tensor.scene import Hold, Scene


class SlicedDropout(TorchFunctionMode):
    """Inside, `dropout` on parts takes its part of the mask of the whole."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.scene.hold is not Hold.COPIES:
            if func in (nn.functional.dropout, torch.dropout):
                return self._dropout(*args, **kwargs)
            if func is nn.functional.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        training = kwargs.get("train", training)
        return x * self._mask(x, p) if training and p > 0 else x

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if dropout_p == 0.0 or self.scene.hold is not Hold.FEATURES:
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        if query.device.type == "cuda":
            with own_numbers(self.scene.axis.rank, query.device):
                return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
        weights = scores.softmax(-1)
        return (weights * self._mask(weights, dropout_p)) @ value

    def _mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """This rank's part of the mask of the whole, scaled as dropout scales."""
        axis, shape = self.scene.axis, list(x.shape)
        if self.scene.hold is Hold.SEQUENCE and x.dim() == 2:  # the batch and the sequence, flattened
            shape = [self.scene.num_rows, x.shape[0] // self.scene.num_rows, x.shape[1]]
            dim = 1
        elif self.scene.hold is Hold.SEQUENCE:
            dim = 1
        else:
            dim = 1 if x.dim() == 4 else x.dim() - 1
        length = shape[dim]
        shape[dim] = length * axis.size
        whole = nn.functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, training=True)
        return whole.narrow(dim, axis.rank * length, length).reshape(x.shape)


@contextlib.contextmanager
def own_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, this rank draws its own numbers; afterwards the random state is as if all had drawn the same."""
    generator = torch.cuda.default_generators[device.index or 0]
    seed = generator.initial_seed()
    offset = generator.get_offset()
    generator.manual_seed(seed + 1 + rank)
    generator.set_offset(offset)
    try:
        yield
    finally:
        used = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(used)


def drops_anything(module: nn.Module) -> bool:
    """Whether a module or one inside it has a dropout above zero, as a module or as a number."""
    for inner in module.modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0:
            return True
        numbers = [value for name, value in vars(inner).items() if "drop" in name and type(value) is float]
        if any(value > 0 for value in numbers):
            return True
    return False


def attach_dropout(module: nn.Module, scene: Scene) -> Detach | None:
    """Makes `module` drop what the one-rank model drops; None if it drops nothing."""
    if not drops_anything(module):
        return None

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def dropping(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return forward(*args, **kwargs)
            with SlicedDropout(scene):
                return forward(*args, **kwargs)

        return dropping

    return replace_forward(module, make)
