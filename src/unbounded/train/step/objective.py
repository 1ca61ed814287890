"""The loss: summed over tokens, so that the mean over a global batch does not depend on how it is split."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unbounded.train.data.tokenizer import IGNORED

_TILE_LOGITS = 1 << 24  # logits turned to fp32 at once: 64 MiB


@dataclass(frozen=True)
class MicroBatch:
    """What a model runs at once. `positions` count from each document's beginning; None: documents are joined.

    `places` are those of the flattened targets that are asked for, where they are few: the head runs on them alone.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None
    places: Tensor | None = None


def logits_of(model: nn.Module, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
    """The model's logits, from a plain tensor or a Hugging Face output.

    With `positions` attention stays within documents: models of transformers read that off positions that begin
    again at 0, as the built-in GPT does.
    """
    options: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    if _takes_cache(model):
        options["use_cache"] = False  # asked for here and not set in its configuration, which is exported as it was
    output = model(input_ids=inputs, **options)
    return output if isinstance(output, Tensor) else output.logits


def _takes_cache(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "use_cache" in inspect.signature(inner.forward).parameters


def summed_loss(model: nn.Module, part: MicroBatch) -> Tensor:
    """Cross entropy in fp32, summed over the targets that are not ignored."""
    if part.places is None:
        return sum_losses(logits_of(model, part.inputs, part.positions), part.targets)
    with _head_at(model, part.places):
        logits = logits_of(model, part.inputs, part.positions)
    return sum_losses(logits, part.targets.flatten()[part.places])


def sum_losses(output: Any, targets: Tensor) -> Tensor:
    """The summed loss of what a model returned.

    Logits are turned to fp32 a tile of rows at a time, and again in the backward pass: the fp32 copy of all of them
    would be the largest tensor of a step.
    """
    logits = (output if isinstance(output, Tensor) else output.logits).flatten(0, 1)
    wanted = targets.flatten()
    rows = max(_TILE_LOGITS // logits.shape[-1], 1)
    if len(logits) <= rows:
        return _tile_loss(logits, wanted)
    tiles = zip(logits.split(rows), wanted.split(rows), strict=True)
    return torch.stack([checkpoint(_tile_loss, *tile, use_reentrant=False) for tile in tiles]).sum()


@contextmanager
def _head_at(model: Any, places: Tensor) -> Iterator[None]:
    """Inside, what stands before the logits (a head with layers of its own, as BERT's) gets these tokens alone."""
    last = model.get_output_embeddings()
    head = next(child for child in model.children() if any(module is last for module in child.modules()))

    def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].flatten(0, 1)[places][None], *args[1:])

    hook = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()


def _tile_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
