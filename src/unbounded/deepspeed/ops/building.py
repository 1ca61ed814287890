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
    options = dict(params)
    if name.lower() == "adamw":
        options["adam_w_mode"] = True
    kind = _KINDS.get(name.lower()) or getattr(torch.optim, name, None)
    if kind is FusedAdam and options.pop("torch_adam", False):  # torch's own weight decay, if params has none
        kind = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    if name.lower() == "muon":
        raise PlanError(
            "optimizer.type is 'Muon', but which parameters it has is said by `use_muon`, which is not read here. Call "
            "unbounded.shard(model, [muon, adamw]) instead of initialize."
        )
    if not isinstance(kind, type):
        raise PlanError(
            f"optimizer.type is {name!r}, which is not available here. Use AdamW, Adam, Lamb, Lion, Adagrad or one "
            "of torch.optim."
        )
    try:
        if "betas" in options:
            options["betas"] = tuple(map(float, options["betas"]))
        return kind(parameters, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError, IndexError) as error:
        raise PlanError(f"the optimizer {name} cannot be made from optimizer.params: {error}.") from None
