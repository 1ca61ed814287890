"""`from_pretrained` without the weights: the model is built on the meta device, and `shard` streams them in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from unbounded.errors import PlanError
from unbounded.paths import expand_home
from unbounded.sharding.placing import expect_weights


def from_pretrained(folder: str | os.PathLike[str], kind: Any = AutoModelForCausalLM, **options: Any) -> nn.Module:
    """The model of `folder`, of the class `kind`, without its weights: `shard` or a trainer here streams them in.

    `folder` has safetensors and a config.json; a model on the hub, given by name, is downloaded first. `options` go to
    the configuration, and `dtype` is that of the parameters (by default that of the files).
    """
    path = _find(folder)
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    config = options.pop("config", None) or AutoConfig.from_pretrained(path, **options)
    if dtype in ("auto", None):
        dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        model = build(config, dtype=dtype)
    for parameter in model.parameters():
        if not parameter.is_meta:  # made with torch.Tensor(...), which heeds no device
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = str(folder)
    expect_weights(model, path)
    return model.eval()  # type: ignore[no-any-return]


def _find(folder: str | os.PathLike[str]) -> Path:
    path = expand_home(folder)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    if not any(path.glob("*.safetensors")):
        raise PlanError(f"{path} has no safetensors files. Save the model to it with save_pretrained.")
    return path
