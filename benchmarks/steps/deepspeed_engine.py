"""DeepSpeed with the three calls of a training loop, for `throughput.py --engine deepspeed`.

Its settings are those that gave it the best step time on one GPU with the optimizer on the host: pinned memory,
overlapped communication, large buckets; for NVMe the pipelined reads and writes with 24 buffers (it asserts with
fewer), 8 MiB blocks and 32 requests in flight.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def settings(*, stage: int, optimizer: str, batch: int, accumulate: int) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": optimizer, "pin_memory": True, "buffer_count": 24}
    if optimizer == "nvme":
        offload |= {"nvme_path": tempfile.mkdtemp(dir="."), "pipeline_read": True, "pipeline_write": True}
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 200_000_000,
        "offload_optimizer": offload,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 2_000_000_000,
            "stage3_max_reuse_distance": 2_000_000_000,
            "sub_group_size": 1_000_000_000,
        }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulate,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "aio": {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "overlap_events": True},
        "steps_per_print": 10**9,
    }


class DeepSpeed:
    """A model made by `make` under DeepSpeed; `prepare` is applied to it before its engine is built."""

    def __init__(self, make: Callable[[], Any], prepare: Callable[[Any], None], config: dict[str, Any]) -> None:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        import deepspeed

        deepspeed.init_distributed("nccl")
        partitioned = config["zero_optimization"]["stage"] == 3
        built_in = deepspeed.zero.Init(config_dict_or_path=config) if partitioned else contextlib.nullcontext()
        torch.set_default_dtype(torch.bfloat16)
        with built_in, contextlib.nullcontext() if partitioned else torch.device("cuda"):
            model = make()
        torch.set_default_dtype(torch.float32)
        prepare(model)
        self.numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
        self.trained = self.numel
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Its engine counts the backwards itself and clips inside its step."""
        for batch in batches:
            loss = self.engine(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()
