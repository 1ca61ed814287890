"""The loss: summed over tokens, so that the mean over a global batch does not depend on how it is split."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unbounded.train.data.tokenizer import IGNORED

_TILE_LOGITS = 1 << 24  # logits turned to fp32 at once: 64 MiB


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits, from a plain tensor or a Hugging Face output."""
    output = model(input_ids=inputs)
    return output if isinstance(output, Tensor) else output.logits


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the targets that are not ignored.

    Logits are turned to fp32 a tile of rows at a time, and again in the backward pass: the fp32 copy of all of them
    would be the largest tensor of a step.
    """
    logits = logits_of(model, inputs).flatten(0, 1)
    wanted = targets.flatten()
    rows = max(_TILE_LOGITS // logits.shape[-1], 1)
    if len(logits) <= rows:
        return _tile_loss(logits, wanted)
    tiles = zip(logits.split(rows), wanted.split(rows), strict=True)
    return torch.stack([checkpoint(_tile_loss, *tile, use_reentrant=False) for tile in tiles]).sum()


def _tile_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
