"""Whether blocks are compiled where the plan leaves it open: on GPUs, in runs long enough to get the time back.

On an H200 machine compiling makes the first step 4 to 6 seconds longer. The others are shorter by 4 % (the built-in
GPT) to 30 % (a Llama of 1.3B parameters).
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from torch import nn
from torch.utils._triton import has_triton

from unbounded.sharding.block_policies import find_blocks
from unbounded.train.gpt import GPT
from unbounded.train.model import Subject
from unbounded.train.options.settings import Settings
from unbounded.train.world import World

# Of a device's computing in the whole run: two minutes or more on GPUs of today.
LEAST_FLOPS = 5e16
# Models of transformers that compile, though they are not marked so.
_TRIED = ("bert",)


def compiles_by_default(subject: Subject, settings: Settings, world: World) -> bool:
    """All ranks must call this. Whether to compile the blocks of a run whose plan says nothing about it."""
    if settings.shard_plan.get("compile", "auto") != "auto" or world.device.type != "cuda":
        return False
    per_token = subject.flops_per_token(settings.sequence_length)
    enough = per_token * settings.batch_tokens * settings.steps / world.size >= LEAST_FLOPS
    if not enough or not _is_known_to_compile(subject.model) or not find_blocks(subject.model):
        return False
    return all(world.collect(_has_compilers()))


def _is_known_to_compile(model: nn.Module) -> bool:
    """Whether the forward is free of what compilers stumble over, according to those who wrote it.

    They say so of mixtures of experts too, whose shapes follow from values: each of those ends a graph, with a warning.
    """
    if any(word in type(module).__name__.lower() for module in model.modules() for word in ("moe", "expert")):
        return False
    adapted: Any = getattr(model, "get_base_model", None)  # of peft
    inner = adapted() if callable(adapted) else model
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    return isinstance(inner, GPT) or kind in _TRIED or bool(getattr(inner, "_can_compile_fullgraph", False))


def _has_compilers() -> bool:
    """Whether inductor can make kernels here: it needs triton for them, and triton needs a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and bool(has_triton())
