"""A sample of text at the end of a run, to show what the model learned."""

from __future__ import annotations

import torch
from torch import nn

from unbounded.train.data.tokenizer import Tokenizer
from unbounded.train.options.settings import Settings
from unbounded.train.step.objective import logits_of

_TEMPERATURE, _TOP = 0.8, 40
# Inputs have multiples of so many tokens: for a length that is new, attention on a GPU first takes 50 ms to prepare.
_LENGTHS = 64


@torch.no_grad()
def continue_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, *, settings: Settings, device: torch.device, multiple: int = 1
) -> str:
    """All ranks must call this. Continues `prompt` with tokens drawn from the settings' seed, the same on every rank.

    Inputs are padded at their end, which the logits before it do not depend on. If ranks hold parts of a sequence, its
    length must be a multiple of `multiple`.
    """
    draw = torch.Generator().manual_seed(settings.seed)
    # Arguments that the locale cannot decode come as escaped bytes.
    tokens = tokenizer.encode_prompt(prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    model.eval()
    for _ in range(settings.sample_tokens):
        seen = tokens[-settings.sequence_length :]
        length = min(-(-len(seen) // _LENGTHS) * _LENGTHS, settings.sequence_length)
        length = -(-length // multiple) * multiple
        inputs = torch.tensor([seen + [0] * (length - len(seen))], device=device)
        best = logits_of(model, inputs)[0, len(seen) - 1].float().cpu().topk(min(_TOP, tokenizer.vocabulary_size))
        odds = torch.softmax(best.values / _TEMPERATURE, 0)
        tokens.append(int(best.indices[torch.multinomial(odds, 1, generator=draw)]))
    model.train()
    return tokenizer.decode(tokens)
