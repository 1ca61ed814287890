"""The optimizer that a config names, with DeepSpeed's defaults: its "Adam" decays weights as AdamW does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unbounded.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from unbounded.deepspeed.ops.adam import FusedAdam
from unbounded.deepspeed.ops.lamb import FusedLamb
from unbounded.deepspeed.ops.lion import FusedLion
from unbounded.errors import PlanError

_KINDS: Mapping[str, Any] = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "fusedadam": FusedAdam,
    "lamb": FusedLamb,
    "lion": FusedLion,
    "adagrad": DeepSpeedCPUAdagrad,
}


def build_optimizer(name: str, params: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """`name` and `params` as the config's optimizer section has them, over `parameters` or groups of them."""
    kind = _KINDS.get(name.lower()) or getattr(torch.optim, name, None)
    if kind is None:
        raise PlanError(
            f"optimizer.type is {name!r}, which is not available here. Use AdamW, Adam, Lamb, Lion, Adagrad or one "
            "of torch.optim."
        )
    options = {key: value for key, value in params.items() if key != "torch_adam"}
    if name.lower() == "adamw":
        options["adam_w_mode"] = True
    try:
        if "betas" in options:
            options["betas"] = tuple(map(float, options["betas"]))
        return kind(parameters, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError, IndexError) as error:
        raise PlanError(f"the optimizer {name} cannot be made from optimizer.params: {error}.") from None
