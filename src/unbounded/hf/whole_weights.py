"""Whole weights for a Trainer class that writes files of its own, on as many ranks as it likes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unbounded.sharding.running import full_params


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """All ranks must call this. Inside, weights are whole, and each in a state dict has memory of its own.

    Those of `full_params` share the memory of their unit, which `safetensors.torch.save_model` refuses.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def copy(module: nn.Module, values: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if torch.is_tensor(value := values.get(prefix + name)):
                key = (parameter.data_ptr(), value.shape)  # what is tied stays tied
                values[prefix + name] = copies.setdefault(key, value.detach().to("cpu", copy=True))

    with full_params(model), ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_state_dict_post_hook(copy).remove)
        yield
