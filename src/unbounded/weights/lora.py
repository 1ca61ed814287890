"""LoRA adapters of peft on a model of `transformers`, which may be on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unbounded.errors import InputError, MissingFrameworkError


def add_adapters(
    model: nn.Module, rank: int, *, alpha: float | None = None, dropout: float = 0.0, targets: Sequence[str] = ()
) -> nn.Module:
    """The model with adapters of `rank`, which alone are trained; without `targets`, at every linear layer."""
    # Outside the meta device's context: inside it peft leaves adapters in fp32, not in the dtype of the base model.
    return _adapt(model, rank, alpha, dropout, targets, is_empty=False)


def add_empty_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The same for a model on the meta device that is only counted: no values are drawn, which takes long for many."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    adapted = _adapt(model, rank, None, 0.0, (), is_empty=True)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def _adapt(
    model: nn.Module, rank: int, alpha: float | None, dropout: float, targets: Sequence[str], *, is_empty: bool
) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingFrameworkError('--lora-rank needs peft. Install it: pip install "unbounded[hf]".') from None
    adapters = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=list(targets) if targets else "all-linear",
        task_type=_task_of(model),
    )
    try:
        return get_peft_model(  # type: ignore[no-any-return]
            model,  # type: ignore[arg-type]
            adapters,
            autocast_adapter_dtype=False,
            low_cpu_mem_usage=is_empty,
        )
    except ValueError as error:
        said = str(error).strip().partition("\n")[0]
        raise InputError(f"the adapters do not fit this model: {said}") from None


def _task_of(model: nn.Module) -> str | None:
    """What peft calls what a model is for: it passes on the inputs of that."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        return None
    config = getattr(model, "config", None)
    return "SEQ_2_SEQ_LM" if getattr(config, "is_encoder_decoder", False) else "CAUSAL_LM"
