"""Attention with dropout over sequences of moderate length, by kernels of our own.

Other kernels draw a random number per probability with a cipher, which takes longer than the attention itself
(`attention_kernels`). What has a mask, other shapes or no dropout is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# What was measured on an H200: 0.78 times torch's time for 128 rows, 0.85 for 512 and 0.94 for 1,024.
LONGEST, WIDTH = 1024, 64
MOST_HEADS = 2**16 - 1  # of all sequences: a grid has no more in its second dimension


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    place: int,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and scale > 0 and _is_ours(query, key, value, dropout_p):
        return _attend(query, key, value, dropout_p, is_causal, scale, place)[0]  # type: ignore[no-any-return]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_ours(query: Tensor, key: Tensor, value: Tensor, p: float) -> bool:
    return (
        0.0 < p < 1.0
        and query.is_cuda
        and query.dim() == 4
        and query.shape == key.shape == value.shape
        and query.shape[0] * query.shape[1] <= MOST_HEADS
        and query.shape[2] <= LONGEST
        and query.shape[3] == WIDTH
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
    )


@torch.library.custom_op("unbounded::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _attend(
    query: Tensor, key: Tensor, value: Tensor, p: float, is_causal: bool, scale: float, place: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, what the backward needs of each row, and the seed; `place` is where in the graph it is drawn."""
    from unbounded.compiled import attention_kernels

    seed = torch.empty(1, dtype=torch.int64, device=query.device).random_(-(2**63), None)
    query, key, value = map(_dense, (query, key, value))
    result, logs = attention_kernels.forward(query, key, value, seed, p=p, is_causal=is_causal, scale=scale)
    return result, logs, seed


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, p: float, is_causal: bool, scale: float, place: int
) -> tuple[Tensor, Tensor, Tensor]:
    logs = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _by_rows(query), logs, query.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("unbounded::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logs: Tensor,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from unbounded.compiled import attention_kernels

    grad, query, key, value, result = map(_dense, (grad, query, key, value, result))
    numbers = {"p": p, "is_causal": is_causal, "scale": scale}
    return attention_kernels.backward(grad, query, key, value, result, logs, seed, **numbers)  # type: ignore[arg-type]


@_attend_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logs: Tensor,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_rows(query), _by_rows(query), _by_rows(query)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, *ctx.numbers, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _give_back(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


_attend.register_autograd(_give_back, setup_context=_keep)


def _by_rows(query: Tensor) -> Tensor:
    """As kernels lay out what they write: (batch, row, head, dim), so that heads lie side by side."""
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, heads, width).transpose(1, 2)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
