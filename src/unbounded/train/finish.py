"""The last acts of a run: a sample of text, and the model exported for others to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import unbounded
from unbounded.train.data.tokenizer import Tokenizer
from unbounded.train.sampling import continue_text
from unbounded.train.settings import Settings
from unbounded.train.world import World


def sample_text(model: nn.Module, tokenizer: Tokenizer, settings: Settings, world: World) -> str:
    """All ranks must call this: the prompt of the settings continued, or nothing where there is none."""
    if not settings.sample or not settings.sample_tokens:
        return ""
    return continue_text(model, tokenizer, settings.sample, settings=settings, device=world.device)


def export_model(model: nn.Module, tokenizer: Tokenizer, settings: Settings, world: World) -> Path | None:
    """All ranks must call this: write the model (of adapters, these alone) where the settings ask for it."""
    if settings.export is None:
        return None
    folder, inner = Path(settings.export), getattr(tokenizer, "inner", None)
    if settings.lora_rank is None:
        unbounded.export(folder, model, tokenizer=inner)
    else:
        _export_adapters(folder, model, inner, world)
    return folder


def _export_adapters(folder: Path, model: Any, tokenizer: Any, world: World) -> None:
    from peft import get_peft_model_state_dict

    with unbounded.full_params(model):
        adapters = {name: value.cpu().clone() for name, value in get_peft_model_state_dict(model).items()}
    if world.is_first:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config["default"].save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
    world.barrier()
