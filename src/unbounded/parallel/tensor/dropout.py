"""Dropout that drops what the one-rank model drops.

If every rank holds the same activations, each draws the same mask from the same random state. If ranks hold parts (of
the heads, of the features, of the sequence), each draws the mask of the whole and takes its part of it, so that random
states advance alike and results are those of one rank. Function calls inside attention code are found by a torch
function mode, which is entered only by modules that drop anything in training. On CUDA, fused attention kernels draw
numbers themselves: there each rank draws its own, and the random state is advanced alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from unbounded.errors import StateError
from unbounded.parallel.attachments import Detach, replace_forward
from unbounded.parallel.tensor.scene import Hold, Scene

_OTHERS = {
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
}

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def innermost_checkpoint() -> Any:
    """What only the `torch.utils.checkpoint` has that this runs in; None outside, and for a compiler."""
    hooks = _top_hooks(True) if _top_hooks is not None and not torch.compiler.is_compiling() else None
    return hooks[0] if hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__ else None


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
            if func in _OTHERS:
                return self._drop_otherwise(func, *args, **kwargs)
            if func is nn.functional.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        training = kwargs.get("train", training)
        return x * self._mask(x, p) if training and p > 0 else x

    def _drop_otherwise(
        self,
        func: Callable[..., torch.Tensor],
        x: torch.Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> torch.Tensor:
        """What drops channels or keeps the variance: done to the whole, in which the other parts are zero."""
        if not training or p == 0:
            return x
        self._check_repeats()
        axis, (shape, dim) = self.scene.axis, self._part_shape(x)
        parts = [x.new_zeros(shape) for _ in range(axis.size)]
        parts[axis.rank] = x.reshape(shape)
        dropped = func(torch.cat(parts, dim), p, training)
        return dropped.narrow(dim, axis.rank * shape[dim], shape[dim]).reshape(x.shape)

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
            self._check_repeats()
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
        self._check_repeats()
        axis, (shape, dim) = self.scene.axis, self._part_shape(x)
        length = shape[dim]
        shape[dim] = length * axis.size
        whole = nn.functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, training=True)
        return whole.narrow(dim, axis.rank * length, length).reshape(x.shape)

    def _part_shape(self, x: torch.Tensor) -> tuple[list[int], int]:
        """The shape of the part in which one dim is cut, and that dim."""
        if self.scene.hold is Hold.SEQUENCE and x.dim() == 2:  # the batch and the sequence, flattened
            return [self.scene.num_rows, x.shape[0] // self.scene.num_rows, x.shape[1]], 1
        if self.scene.hold is Hold.SEQUENCE:
            return list(x.shape), 1
        return list(x.shape), 1 if x.dim() == 4 else x.dim() - 1

    def _check_repeats(self) -> None:
        """Raises if what runs now will run again by itself, where this mode is not entered."""
        found = innermost_checkpoint()
        if found is not None and found is not self.scene.checkpoint:
            raise StateError(
                "dropout inside a block that is cut over an axis runs in a torch.utils.checkpoint of a part of the "
                "block, which would drop something else when it runs again. Checkpoint whole blocks, or use "
                "activations='recompute' in the plan."
            )


@contextmanager
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
        if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
            return True
        numbers = [value for name, value in vars(inner).items() if "drop" in name and type(value) is float]
        if any(value > 0 for value in numbers):
            return True
    return False


def attach_dropout(module: nn.Module, scene: Scene) -> Detach:
    """Makes `module` drop what the one-rank model drops, also inside or around another for which that is done.

    A run that breaks off, as one in the backward does as soon as all is there, leaves held what was held before.
    """

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def dropping(*args: Any, **kwargs: Any) -> Any:
            hold, is_dropping, around = scene.hold, scene.is_dropping, scene.checkpoint
            begins = module.training and not is_dropping
            scene.is_dropping, scene.checkpoint = is_dropping or begins, innermost_checkpoint()
            try:
                with SlicedDropout(scene) if begins else nullcontext():
                    return forward(*args, **kwargs)
            except BaseException:
                scene.hold = hold
                raise
            finally:
                scene.is_dropping, scene.checkpoint = is_dropping, around

        return dropping

    return replace_forward(module, make)
