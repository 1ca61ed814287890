"""Checks that a model keeps the documents of a sequence apart when positions say where they begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unbounded.errors import InputError
from unbounded.train.step.objective import logits_of

_DOCUMENT = 4  # tokens
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest logit


@torch.no_grad()
def check_separation(model: nn.Module, device: torch.device) -> None:
    """All ranks must call this. Raises if the content of one document changes the model's output for the next.

    Models differ in how they use positions, and one that ignores them would silently train across documents.
    """
    document = torch.arange(1, _DOCUMENT + 1, device=device)
    inputs = torch.stack([torch.cat([document, document]), torch.cat([document + 3, document])])
    positions = torch.arange(_DOCUMENT, device=device).repeat(2, 2)
    model.eval()
    try:
        one, other = logits_of(model, inputs, positions)[:, _DOCUMENT:].float()
    except TypeError as error:
        raise InputError(f"--packing separated does not work with this model: {error}. Use --packing joined.") from None
    finally:
        model.train()
    _compare(one, other, _ROUNDING[next(p.dtype for p in model.parameters() if p.is_floating_point())])


def _compare(one: Tensor, other: Tensor, rounding: float) -> None:
    change = float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
    if not change <= rounding:
        raise InputError(
            f"--packing separated does not work with this model: a document changes logits of the next by {change:.2g} "
            "of their size, whatever the positions are. Use --packing joined."
        )
