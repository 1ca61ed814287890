"""Batch sizes: train batch = micro-batch x accumulation x data ranks. Two of the three give the third."""

from __future__ import annotations

from dataclasses import dataclass

from unbounded.deepspeed.ds_config import DeepSpeedConfig
from unbounded.errors import PlanError


@dataclass(frozen=True)
class Batches:
    """The three sizes, consistent. `world_size` counts the ranks that get rows of their own."""

    train: int
    micro: int
    accumulation: int
    world_size: int

    @classmethod
    def of(cls, config: DeepSpeedConfig, world_size: int) -> Batches:
        """What the config says, and what follows from it."""
        given, micro, steps = config.train_batch_size, config.micro_batch_size, config.accumulation_steps
        if given is not None and micro is None:
            micro = given // ((steps or 1) * world_size)
        micro = micro or 1
        if given is not None and steps is None:
            steps = given // (micro * world_size)
        steps = steps or 1
        train = micro * steps * world_size
        if given not in (None, train):
            raise PlanError(
                f"train_batch_size is {given}, but train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {steps} x {world_size} data ranks is {train}. Correct one of them."
            )
        return cls(train, micro, steps, world_size)
