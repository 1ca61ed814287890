"""The end of a run: a sample of text, and the exported model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import unbounded
from unbounded.train.data.tokenizer import Tokenizer
from unbounded.train.options.settings import Settings
from unbounded.train.step.sampling import continue_text
from unbounded.train.world import World


def sample_text(model: nn.Module, tokenizer: Tokenizer, settings: Settings, world: World) -> str:
    """All ranks must call this. Continues the prompt in the settings; an empty text if there is none."""
    if not settings.sample or not settings.sample_tokens:
        return ""
    multiple = world.axes.context.size * world.axes.tensor.size
    return continue_text(model, tokenizer, settings.sample, settings=settings, device=world.device, multiple=multiple)


def export_model(model: nn.Module, tokenizer: Tokenizer, settings: Settings) -> Path | None:
    """All ranks must call this. Writes the model, or only its adapters, to the folder in the settings."""
    if settings.export is None:
        return None
    folder = Path(settings.export)
    unbounded.export(folder, model, tokenizer=getattr(tokenizer, "inner", None))
    return folder
