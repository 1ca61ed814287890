"""`deepspeed.checkpointing`: recomputation as models call it themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from unbounded.deepspeed.ds_config import read_config

_offload = False


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, checkpoint_in_cpu: bool | None = None, **unused: Any
) -> None:
    """Chooses whether inputs of checkpointed functions wait in host memory; the rest has no meaning here."""
    global _offload
    if deepspeed_config is not None:
        _offload = read_config(deepspeed_config).offloads_checkpoints
    if checkpoint_in_cpu is not None:
        _offload = checkpoint_in_cpu


def is_configured() -> bool:
    return True


def reset() -> None:
    """There is nothing to reset: no buffers are kept between passes."""


def checkpoint(function: Any, *args: Any) -> Any:
    """`function(*args)`, recomputed in the backward, with the random state it had."""
    if not _offload:
        return recompute(function, *args, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        return recompute(function, *args, use_reentrant=False)
