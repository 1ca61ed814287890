"""`deepspeed.ops.adam`: torch's Adam and AdamW under DeepSpeed's names. The plan decides where updates run."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay unless `adam_w_mode=False`, like DeepSpeed's class of this name."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False is not available. Leave it at True, as torch.optim.Adam does.")
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    """The same update; this class spells the argument `adamw_mode`."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
