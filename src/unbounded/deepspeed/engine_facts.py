"""What a DeepSpeed engine says about itself: ranks, batch sizes, rates, and what its config asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unbounded.deepspeed import comm
from unbounded.deepspeed.batch_sizes import Batches
from unbounded.deepspeed.ds_config import DeepSpeedConfig
from unbounded.errors import PlanError
from unbounded.sharding.running import sharded


class EngineFacts(nn.Module):
    """A sharded model with its optimizer, schedule and config, and DeepSpeed's questions about them."""

    def __init__(
        self, model: nn.Module, optimizer: Any, schedule: Any, config: DeepSpeedConfig, batches: Batches
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler, self.config, self.batches = optimizer, schedule, config, batches
        self.training_dataloader: DataLoader[Any] | None = None
        self.global_steps = self.micro_steps = self.global_samples = 0

    @property
    def device(self) -> torch.device:
        return sharded(self.module).engine.device

    @property
    def global_rank(self) -> int:
        return comm.get_rank()

    @property
    def local_rank(self) -> int:
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        return comm.get_world_size()

    @property
    def dp_world_size(self) -> int:
        return self.batches.world_size

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """The learning rate of every group from now on; a schedule, if there is one, sets it again."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """The momentum of every group, or its betas."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Other numbers of micro-batches from now on, which stay as large as they are."""
        rows = self.batches.micro * self.batches.world_size
        if train_batch_size < 1 or train_batch_size % rows != 0:
            raise PlanError(
                f"set_train_batch_size was given {train_batch_size}, but micro-batches of all ranks have {rows} rows "
                f"together. Give a multiple of {rows}."
            )
        self.batches = replace(self.batches, train=train_batch_size, accumulation=train_batch_size // rows)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Larger or smaller micro-batches from now on, and as many of them."""
        rows = micro_batch_size * self.batches.world_size
        self.batches = replace(self.batches, micro=micro_batch_size, train=rows * self.batches.accumulation)

    def train_batch_size(self) -> int:
        return self.batches.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batches.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batches.accumulation

    def gradient_clipping(self) -> float:
        return self.config.clipping or 0.0

    def zero_optimization_stage(self) -> int:
        return self.config.plan.stage

    def zero_optimization(self) -> bool:
        return self.config.plan.stage > 0

    def fp16_enabled(self) -> bool:
        return self.config.plan.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.plan.precision == "bf16"

    def loss_scale(self) -> float:
        scale = self.optimizer.loss_scale if self.optimizer is not None else None
        return 1.0 if scale is None else scale.value

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterable[tuple[str, nn.Parameter]]:  # type: ignore[override]
        """Under the model's own names."""
        return self.module.named_parameters(*args, **kwargs)
