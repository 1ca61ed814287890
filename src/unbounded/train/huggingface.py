"""Hugging Face models: from a folder with weights, from a configuration alone, or with peft adapters.

All are built on the meta device, including adapters. `unbounded.shard` streams the weights in and lets peft initialise
the adapters, unit by unit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.errors import InputError
from unbounded.train.data.tokenizer import FolderTokenizer
from unbounded.train.options.settings import Settings
from unbounded.weights.kept_in_fp32 import keep_in_fp32
from unbounded.weights.lora import add_adapters


def build_pretrained(
    settings: Settings, dtype: torch.dtype
) -> tuple[nn.Module, FolderTokenizer, str | None, tuple[int, int]]:
    """The model, its tokenizer, the folder to stream weights from (or None), and its layers and width."""
    path = _find(settings)
    config = _read_config(path, needs_weights=settings.model is not None)
    _check_length(settings, config)
    tokenizer = FolderTokenizer(settings.tokenizer or (path if path.is_dir() else path.parent))
    model = _build_empty(path, config, dtype, settings.objective)
    if settings.lora_rank is not None:
        alpha, dropout, targets = settings.lora_alpha, settings.lora_dropout, settings.lora_targets or ()
        model = add_adapters(model, settings.lora_rank, alpha=alpha, dropout=dropout, targets=targets)
    _check_vocabulary(tokenizer, model)
    model.train()
    weights = str(path) if settings.model is not None else None
    text = config.get_text_config()
    return model, tokenizer, weights, (int(text.num_hidden_layers), int(text.hidden_size))


def _find(settings: Settings) -> Path:
    path = Path(settings.model or settings.from_config or "")
    if settings.model is not None and not path.is_dir():
        raise InputError(f'model folder "{path}" does not exist. Give a folder that from_pretrained can read.')
    if not path.is_dir() and not path.is_file():
        raise InputError(f'model configuration "{path}" does not exist. Give a config.json or a folder with one.')
    return path


def _read_config(path: Path, *, needs_weights: bool) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise InputError(f'"{path}" needs transformers. Install it: pip install "unbounded[hf]".') from None
    names = os.listdir(path) if path.is_dir() else []  # an error where the user may not look, unlike a glob
    if needs_weights and not any(name.endswith(".safetensors") for name in names):
        raise InputError(f'model folder "{path}" has no safetensors file. Save the model there with save_pretrained.')
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises a dozen kinds here; the user needs the one line
        raise InputError(f'no model configuration can be read from "{path}": {_first_line(error)}') from None
    if not needs_weights and getattr(config, "quantization_config", None):
        raise InputError(
            f'"{path}" is the configuration of a quantized model, but training from scratch gives plain weights, which '
            'nobody could load with it. Remove "quantization_config" from it.'
        )
    _check_shape(path, config)
    _check_router(path, config)
    return config


def _build_empty(path: Path, config: Any, dtype: torch.dtype, objective: str) -> nn.Module:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    kind: Any = AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: nn.Module = kind.from_config(config, dtype=dtype)
    except Exception as error:  # a model's code may fail in any way on an odd configuration
        raise InputError(
            f'"{path}" is not a language model that --objective {objective} can train: {_first_line(error)}'
        ) from None
    sees_all = type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(model.config, "is_decoder", None) is False
    if objective == "next" and sees_all:
        raise InputError(
            f'"{path}" is a model such as BERT, which sees the tokens that --objective next has it predict. '
            'Train it with --objective masked, or set "is_decoder": true in its config.json.'
        )
    keep_in_fp32(model, dtype)
    _read_generation(path, model)
    return model


def _read_generation(path: Path, model: Any) -> None:
    """The folder's own generation settings, which checkpoints and exports keep."""
    from transformers import GenerationConfig

    if (path / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
        except Exception as error:
            raise InputError(f'"{path}/generation_config.json" cannot be read: {_first_line(error)}') from None


def _check_shape(path: Path, config: Any) -> None:
    """Refuse impossible sizes before anything loops over them."""
    text = config.get_text_config()
    for key, most in (("num_hidden_layers", 10_000), ("hidden_size", 1 << 20), ("vocab_size", 1 << 28)):
        value = getattr(text, key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(f'"{path}" says {key} = {value!r}, but it must be a whole number from 1 to {most}.')


def _check_router(path: Path, config: Any) -> None:
    """Refuse a model whose own loss has a part that this job would leave out."""
    text = config.get_text_config()
    weights = (getattr(text, name, 0) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    if getattr(text, "output_router_logits", False) and any(weights):
        raise InputError(
            f'"{path}" says output_router_logits = true, which adds a loss that balances the experts, but this job has '
            "only that of the tokens. Set it to false in config.json, or use unbounded.hf.Trainer, which has both."
        )


def _check_length(settings: Settings, config: Any) -> None:
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context and settings.sequence_length > context:
        raise InputError(
            f"--sequence-length {settings.sequence_length} is more than the {context} positions of the model. "
            f"Choose at most {context}."
        )


def _check_vocabulary(tokenizer: FolderTokenizer, model: Any) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary_size > rows:
        raise InputError(
            f'tokenizer "{tokenizer.name}" does not match the model: it has {tokenizer.vocabulary_size} tokens and the '
            f"model embeds {rows}. Give the model's own tokenizer with --tokenizer."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
