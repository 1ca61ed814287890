"""`deepspeed.ops.lion`: the optimizer that torch lacks. The engine's kernel runs the update."""

from __future__ import annotations

from typing import Any

import torch

from unbounded.errors import StateError


class FusedLion(torch.optim.Optimizer):
    """Lion, for `initialize` and `shard`; it does not step by itself."""

    unbounded_rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        raise StateError(
            "FusedLion cannot step by itself. Give it to initialize or shard, and use the optimizer that they return."
        )


DeepSpeedCPULion = FusedLion
