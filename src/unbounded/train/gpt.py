"""A small GPT, so that a job needs nothing but this package: pre-norm blocks, learned positions, causal attention.

Every module that owns parameters can initialise itself with `reset_parameters`, so that the model may be built on the
meta device and made real unit by unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


class Linear(nn.Linear):
    """A linear layer without bias, initialised with small normal noise."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.weight, std=0.02 * self.gain)


class Embedding(nn.Embedding):
    """An embedding initialised with small normal noise."""

    def reset_parameters(self) -> None:
        """Draw the rows again."""
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.heads, shape.width // shape.heads
        self.inputs = Linear(shape.width, 3 * shape.width)
        self.outputs = Linear(shape.width, shape.width, gain=1 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix each position with those before it, or with those that `mask` allows."""
        rows, length, _ = x.shape
        split = self.inputs(x).view(rows, length, 3, self.num_heads, self.head_dim)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.outputs(mixed.transpose(1, 2).reshape(rows, length, -1))


class GPTBlock(nn.Module):
    """Attention, then a feed-forward layer of four times the width."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed_in = Linear(shape.width, 4 * shape.width)
        self.feed_out = Linear(4 * shape.width, shape.width, gain=1 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the outputs of the two layers to `x`."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    tp_plan: ClassVar = {  # how a tensor axis cuts its layers
        "blocks.*.attention.inputs": "column_of_3",
        "blocks.*.attention.outputs": "row",
        "blocks.*.feed_in": "column",
        "blocks.*.feed_out": "row",
        "tokens": "vocabulary",
        "head": "head",
    }

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.positions = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        """The head, as models of transformers name it."""
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits for every position of `input_ids` (rows, length).

        With `position_ids`, each run of positions that starts at 0 is a document and sees only itself.
        """
        mask = None if position_ids is None else mask_documents(position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        return self.head(self.norm(x))


def mask_documents(position_ids: Tensor) -> Tensor:
    """(rows, 1, length, length): each position may look at those before it in its own document."""
    document = (position_ids == 0).cumsum(-1)
    length = position_ids.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return (document[:, None, :, None] == document[:, None, None, :]) & causal
