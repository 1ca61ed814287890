"""Which model families are compared with one rank on which meshes.

    TWO, FOUR, EIGHT    every mesh of so many ranks
    DEALT_TWO, _FOUR    the part of each that a family is tested on: every mesh for some family, every family on some

`python -m tests.parallel` runs every family on every mesh.
"""

from __future__ import annotations

from typing import Any

Plan = dict[str, Any]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
FAMILIES = ("gpt2", "llama", "qwen3", "mixtral", "bert", "t5")
TWO: dict[str, Plan] = {
    "tensor": {"tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    **{schedule: {"pipeline": 2, "schedule": schedule, "microbatches": 4} for schedule in SCHEDULES},
}
FOUR: dict[str, Plan] = {
    "tensor": {"tensor": 4},  # llama, qwen3, mixtral: two key heads, each on two ranks
    "tensor, sequence": {"tensor": 4, "sequence": True, "activations": "recompute"},
    **{schedule: {"pipeline": 4, "schedule": schedule, "microbatches": 4} for schedule in SCHEDULES},
    "data, tensor": {"tensor": 2, "sequence": True, "optimizer": "host", "weights": "host"},
    "data, tensor, disk": {"tensor": 2, "stage": 1, "optimizer": "disk", "gradients": "disk"},
    "data, pipeline": {"pipeline": 2, "microbatches": 2, "weights": "host", "optimizer": "host"},
    "data, pipeline, disk": {
        "pipeline": 2,
        "microbatches": 2,
        "schedule": "gpipe",
        "weights": "disk",
        "optimizer": "disk",
    },
    "data, pipeline, stage 1": {"pipeline": 2, "microbatches": 2, "stage": 1, "activations": "recompute"},
    "data, context": {"context": 2, "stage": 3},
    "tensor, pipeline": {
        "pipeline": 2,
        "schedule": "interleaved",
        "microbatches": 2,
        "tensor": 2,
        "sequence": True,
    },
    "tensor, context": {"tensor": 2, "context": 2, "optimizer": "host"},
    "context, pipeline": {"context": 2, "pipeline": 2, "microbatches": 2},
}
EIGHT: dict[str, Plan] = {
    "data, tensor, pipeline": {"pipeline": 2, "tensor": 2, "sequence": True, "microbatches": 2},
    "tensor, context, pipeline": {"pipeline": 2, "tensor": 2, "context": 2, "microbatches": 2},
}
_CUT = ("tensor", "tensor, sequence", "context")
DEALT_TWO: dict[str, tuple[str, ...]] = {
    "gpt2": tuple(TWO),  # tied embeddings
    "llama": (*_CUT, "1f1b"),
    "qwen3": (*_CUT, "interleaved"),
    "mixtral": (*_CUT, "1f1b"),
    "bert": (*_CUT, "interleaved"),
    "t5": ("tensor", "tensor, sequence", *SCHEDULES),  # two lists of blocks
}
DEALT_FOUR: dict[str, tuple[str, ...]] = {
    "gpt2": ("tensor", "1f1b", "interleaved", "context, pipeline", "data, tensor, disk"),
    "llama": ("tensor", "data, context", "tensor, context"),
    "qwen3": ("tensor, sequence", "gpipe", "data, tensor"),
    "mixtral": ("tensor, pipeline", "data, pipeline, stage 1"),
    "bert": ("tensor, context", "data, pipeline, disk"),
    "t5": ("zero_bubble", "tensor, pipeline", "data, pipeline"),
}


def few_blocks(family: str) -> dict[str, int]:
    """Two blocks, which is enough where no stages are cut: what `models.build` changes."""
    # Llama 4 has a block of another kind after three; T5 has two of each kind anyway.
    return {"gpt2": {"n_layer": 2}, "t5": {}, "llama4": {}}.get(family, {"num_hidden_layers": 2})


def blocks(family: str, plan: Plan) -> dict[str, int]:
    """Twice as many blocks if each of four ranks has two chunks of them: what `models.build` changes."""
    if plan.get("schedule") != "interleaved" or plan["pipeline"] < 4:
        return {}
    return {"gpt2": {"n_layer": 8}, "t5": {"num_layers": 4}}.get(family, {"num_hidden_layers": 8})


def fits(family: str, plan: Plan) -> bool:
    """T5 adds a bias of positions to its attention, which a context axis does not cut."""
    return not (family == "t5" and "context" in plan)
