"""`from_pretrained` without the weights: the model is built on the meta device, and `shard` streams them in."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from unbounded.errors import PlanError, StateError
from unbounded.paths import expand_home
from unbounded.sharding.placing import expect_weights
from unbounded.weights.kept_in_fp32 import keep_in_fp32
from unbounded.weights.safetensors_reader import WeightFolder

_ON_THE_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_KERNELS = ("attn_implementation", "experts_implementation")
_PLACING = (
    "device_map", "max_memory", "low_cpu_mem_usage", "offload_folder", "offload_state_dict", "offload_buffers",
    "use_safetensors", "ignore_mismatched_sizes",
)  # fmt: skip
"""What `transformers` needs to load weights: `shard` places them, and says which do not fit."""


def from_pretrained(folder: str | os.PathLike[str], kind: Any = AutoModelForCausalLM, **options: Any) -> nn.Module:
    """The model of `folder`, of the class `kind`, without its weights: `shard` or a trainer here streams them in.

    `folder` has safetensors and a config.json; a model on the hub, given by name, is downloaded first. `options` go to
    the configuration, and `dtype` is that of the parameters (by default that of the files), except for those that
    transformers keeps in fp32. Options that say where the model is on the hub (`revision`, `token`, ...) are heeded;
    `device_map` and the like are not, since `shard` places.
    Nothing can be loaded into the model before that.
    """
    code = {key: options.pop(key) for key in ("trust_remote_code",) if key in options}
    on_the_hub = {key: options.pop(key) for key in _ON_THE_HUB if key in options}
    path = _find(folder, on_the_hub, with_code=bool(code.get("trust_remote_code")))
    path /= options.pop("subfolder", None) or ""
    if not any(path.glob("*.safetensors")):
        raise PlanError(f"{path} has no safetensors files. Save the model to it with save_pretrained.")
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    kernels = {key: options.pop(key) for key in _KERNELS if options.get(key) is not None}
    config = copy.deepcopy(options.pop("config", None))
    if config is None:
        config, options = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **code, **options)
    unknown = [key for key, value in options.items() if value is not None and key not in _PLACING]
    if unknown:
        raise PlanError(
            f"from_pretrained was given {', '.join(unknown)}, which {type(config).__name__} does not have, and which "
            "has no effect on a model that is streamed in. Leave it out."
        )
    if dtype in ("auto", None):
        dtype = getattr(config, "dtype", None) or WeightFolder(path).dtype() or torch.float32
    dtype = _read_dtype(dtype)
    with torch.device("meta"):
        by_config = hasattr(kind, "from_config")
        build = partial(kind.from_config, **code) if by_config else kind._from_config
        model = build(config, dtype=dtype, **kernels)
    for parameter in model.parameters():
        if not parameter.is_meta:  # made with torch.Tensor(...), which heeds no device
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    keep_in_fp32(model, dtype)
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = str(folder)
    expect_weights(model, path)
    model.register_load_state_dict_pre_hook(_refuse_values)
    return model.eval()  # type: ignore[no-any-return]


def _read_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise PlanError(
            f"dtype is {dtype!r}, but the parameters of a model that is streamed in have one dtype. Give one, such as "
            '"bfloat16".'
        )
    return found


def _refuse_values(module: nn.Module, values: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Until `shard` streams values in, there is nothing that loaded ones could be kept in."""
    is_loaded = any(key.startswith(prefix) for key in values)
    if is_loaded and any(parameter.is_meta for parameter in module.parameters()):
        raise StateError(
            "values are loaded into a model that has none until `shard` streams them in, so they would be lost. Load "
            "them after `shard`; for adapters, build the model with get_peft_model(model, "
            "PeftConfig.from_pretrained(folder)) and give `shard` weights=folder."
        )


def _find(folder: str | os.PathLike[str], on_the_hub: dict[str, Any], *, with_code: bool) -> Path:
    path = expand_home(folder)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", *(["*.py"] if with_code else [])]
        path = Path(snapshot_download(str(folder), allow_patterns=patterns, **on_the_hub))
    return path
