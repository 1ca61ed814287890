"""What `transformers` keeps in fp32 in a model that it loads in 16 bits, such as corrections of experts' routers."""

from __future__ import annotations

import re

import torch
from torch import nn


def keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives these parts of a model on the meta device, built in `dtype`, what `from_pretrained` gives them."""
    globs = list(model._get_dtype_plan(dtype)) if hasattr(model, "_get_dtype_plan") else []  # type: ignore[operator]
    if not globs:
        return
    pattern = re.compile("|".join(glob.replace("*", ".*") for glob in globs))
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.float()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and pattern.search(f"{prefix}.{key}"):
                module._buffers[key] = buffer.float()
