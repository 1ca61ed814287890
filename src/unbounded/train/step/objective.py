"""The loss: summed over tokens, so that the mean over a global batch does not depend on how it is split.

Over a tensor axis every rank keeps the logits of its part of the vocabulary, and the loss joins two numbers per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unbounded.activations.tiled.loss import LabelRange, entropy_of_logits
from unbounded.parallel.tensor.head.vocabulary import HeadPart
from unbounded.sharding.running import cut_head
from unbounded.train.data.tokenizer import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    """What a model runs at once. `positions` count from each document's beginning; None: documents are joined.

    `places` are the flattened targets to predict, if they are few: the head runs only on them.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None
    places: Tensor | None = None


def logits_of(model: nn.Module, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
    """The model's logits, from a plain tensor or a Hugging Face output.

    With `positions`, attention stays within documents: models of transformers, like the built-in GPT, see where
    documents begin from positions that start again at 0.
    """
    options: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    if _takes_cache(model):
        options["use_cache"] = False  # passed here and not set in its configuration, which is exported unchanged
    output = model(input_ids=inputs, **options)
    return output if isinstance(output, Tensor) else output.logits


def _takes_cache(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "use_cache" in inspect.signature(inner.forward).parameters


def summed_loss(model: nn.Module, part: MicroBatch) -> Tensor:
    """Cross entropy in fp32, summed over the targets that are not ignored."""
    targets = part.targets.flatten() if part.places is None else part.targets.flatten()[part.places]
    early = LabelRange(targets, IGNORED)
    with logits_as_cut(model) as head, nullcontext() if part.places is None else _head_at(model, part.places):
        logits = logits_of(model, part.inputs, part.positions)
    return sum_losses(logits, targets, head, early)


@contextmanager
def logits_as_cut(model: nn.Module) -> Iterator[HeadPart | None]:
    """Inside, logits are this rank's part of the vocabulary, which this yields; with None they are whole."""
    head = cut_head(model)
    with nullcontext() if head is None else head.kept():
        yield head


def sum_losses(output: Any, targets: Tensor, head: HeadPart | None = None, early: LabelRange | None = None) -> Tensor:
    """The summed loss of what a model returned: all logits, or those of `head`. `early` is the targets' range."""
    logits = (output if isinstance(output, Tensor) else output.logits).flatten(0, 1)
    return entropy_of_logits(logits, targets.flatten(), ignore_index=IGNORED, vocabulary=head, early=early)


@contextmanager
def _head_at(model: Any, places: Tensor) -> Iterator[None]:
    """Inside, the head (with its inner layers, as in BERT) gets only these tokens."""
    last = model.get_output_embeddings()
    head = next(child for child in model.children() if any(module is last for module in child.modules()))

    def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].flatten(0, 1)[places][None], *args[1:])

    hook = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
