"""The calls of DeepSpeed scripts: `import unbounded.deepspeed as deepspeed`, and the script runs.

`initialize` reads the config (`ds_config.py`), shards the model and returns an engine with DeepSpeed's methods
(`deepspeed_engine.py`). `plan_from_config` gives only the plan, for scripts that call `unbounded.shard` themselves.
"""

from __future__ import annotations

from typing import Any

from unbounded.deepspeed import accelerator, checkpointing, comm, ops, utils, zero
from unbounded.deepspeed.accelerator import get_accelerator
from unbounded.deepspeed.comm import init_distributed
from unbounded.deepspeed.deepspeed_engine import DeepSpeedEngine
from unbounded.deepspeed.ds_config import DeepSpeedConfig, plan_from_config, read_config
from unbounded.deepspeed.initialization import add_config_arguments, initialize

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "plan_from_config",
    "read_config",
    "utils",
    "zero",
]

_STAGES = "With `unbounded.pipeline(model)` and {'pipeline': 2} in the plan, blocks of any model are stages."
_INSTEAD = {
    "PipelineModule": _STAGES,
    "pipe": _STAGES,
    "moe": "Layers with experts, such as those of transformers, are partitioned like all others.",
    "OnDevice": 'Build the model under `torch.device("meta")`.',
    "tp_model_init": "Give the config {'tensor_parallel': {'autotp_size': 2}}.",
    "init_inference": "Export the weights (`unbounded.export`) for a program that serves models.",
}


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no {name!r}. {_INSTEAD.get(name, '')}".rstrip())
