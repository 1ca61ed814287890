"""Every setting of a training job: one frozen value, each field of it a TOML key and a flag.

A field left None is open; `unbounded.train.settings` closes it for the machine and model at hand. Kept free of torch,
so that `unbounded train --help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(group: str, help: str, default: Any = None, **extra: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": help, **extra})


GROUPS = _MODEL, _DATA, _BATCH, _OPTIMIZER, _PLACE, _RUN = "model", "data", "batch", "optimizer", "placement", "run"


@dataclass(frozen=True)
class Config:
    """What the user asked for."""

    model: str | None = _setting(
        _MODEL, "folder of a Hugging Face model to train; without it, a GPT over bytes", metavar="PATH"
    )
    from_config: str | None = _setting(
        _MODEL, "folder or config.json of a Hugging Face model to start from nothing", metavar="PATH"
    )
    tokenizer: str | None = _setting(_MODEL, "folder of the tokenizer (the model's own)", metavar="PATH")
    layers: int | None = _setting(_MODEL, "blocks of the built-in GPT")
    width: int | None = _setting(_MODEL, "width of the built-in GPT")
    heads: int | None = _setting(_MODEL, "attention heads of the built-in GPT")
    lora_rank: int | None = _setting(_MODEL, "train low-rank adapters of this rank with peft, the rest frozen")
    lora_alpha: float | None = _setting(_MODEL, "scale of the adapters (twice the rank)")
    lora_dropout: float = _setting(_MODEL, "dropout of the adapters", 0.0)
    lora_targets: tuple[str, ...] | None = _setting(_MODEL, "names of the layers to adapt (every linear layer)")

    data: tuple[str, ...] | None = _setting(_DATA, "files, folders or globs (the sources of Python's standard library)")
    data_format: str = _setting(_DATA, "how to read them", "auto", choices=("auto", "text", "jsonl", "chat", "parquet"))
    text_field: str = _setting(_DATA, "field or column that holds the text", "text")
    messages_field: str = _setting(_DATA, "field or column that holds a conversation", "messages")
    eval_fraction: float | None = _setting(_DATA, "share of the documents held out for evaluation (0.01)")
    eval_data: tuple[str, ...] | None = _setting(_DATA, "evaluation data of its own, instead of a share")
    eval_every: int | None = _setting(_DATA, "steps between evaluations; 0: none (a tenth of the run)")
    eval_tokens: int | None = _setting(_DATA, "tokens of one evaluation, at most (those of 8 steps)")
    restart_data: bool = _setting(_DATA, "when resuming, begin the data anew instead of at the exact sample", False)

    sequence_length: int | None = _setting(_BATCH, "tokens of a sequence")
    batch_tokens: int | None = _setting(_BATCH, "tokens of a step over all ranks")
    micro_batch: int | None = _setting(_BATCH, "sequences a rank runs at once; the rest is accumulated")
    steps: int | None = _setting(_BATCH, "optimizer steps")
    epochs: float | None = _setting(_BATCH, "passes over the data, instead of steps")

    lr: float | None = _setting(_OPTIMIZER, "peak learning rate")
    warmup: int | None = _setting(_OPTIMIZER, "steps to reach it (a twentieth of the run)")
    decay: str = _setting(_OPTIMIZER, "how it falls after that", "cosine", choices=("cosine", "linear", "constant"))
    final_lr: float | None = _setting(_OPTIMIZER, "learning rate at the end (a tenth of the peak)")
    weight_decay: float = _setting(_OPTIMIZER, "of matrices; norms, biases and embeddings have none", 0.1)
    beta1: float = _setting(_OPTIMIZER, "AdamW's first beta", 0.9)
    beta2: float = _setting(_OPTIMIZER, "AdamW's second beta", 0.95)
    eps: float = _setting(_OPTIMIZER, "AdamW's epsilon", 1e-8)
    clip: float = _setting(_OPTIMIZER, "largest norm of the gradient; 0: any", 1.0)
    on_nan: str = _setting(
        _OPTIMIZER, "what a loss or gradient that is not finite does", "stop", choices=("stop", "skip")
    )

    precision: str | None = _setting(
        _PLACE, "number format of the weights (bf16 on a GPU, else fp32)", choices=("bf16", "fp16", "fp32")
    )
    activations: str | None = _setting(
        _PLACE,
        "between a block's forward and backward: keep them, recompute them, have its input on the host too, or the "
        "first of these that a GPU has room for (auto; host for the built-in GPT)",
        choices=("auto", "keep", "recompute", "host"),
    )
    device: str | None = _setting(_PLACE, "where to compute (a GPU if there is one)", choices=("cpu", "cuda"))
    device_bytes: str | None = _setting(_PLACE, 'device memory to use, as "24GiB" (what is free)', metavar="SIZE")
    host_bytes: str | None = _setting(_PLACE, "host memory to use (what is free)", metavar="SIZE")
    disk_bytes: str | None = _setting(_PLACE, "disk to use (what is free)", metavar="SIZE")
    disk_path: tuple[str, ...] | None = _setting(_PLACE, "folders to put states in (a temporary one)")
    plan: tuple[tuple[str, Any], ...] = _setting(_PLACE, "any other field of the plan, as key=value", (), keyed=True)

    output: str | None = _setting(_RUN, "folder for checkpoints and metrics (runs/default)", metavar="PATH")
    resume: str = _setting(_RUN, "go on from the last checkpoint there", "auto", choices=("auto", "must", "never"))
    checkpoint_every: int | None = _setting(_RUN, "steps between checkpoints; 0: only at the end (a fifth of the run)")
    checkpoint_minutes: float | None = _setting(_RUN, "minutes between checkpoints, also or instead")
    keep_last: int = _setting(_RUN, "checkpoints to keep", 2)
    export: str | None = _setting(_RUN, "folder to export the trained model to, for from_pretrained", metavar="PATH")
    sample: str | None = _setting(
        _RUN, "text to continue at the end; empty: none (for the built-in GPT, a prompt)", metavar="TEXT"
    )
    sample_tokens: int = _setting(_RUN, "tokens of that sample", 200)
    seed: int = _setting(_RUN, "of the weights, the order of the data and the sample", 0)
    log_every: int = _setting(_RUN, "steps between lines where the output is no terminal", 10)
    trace: str | None = _setting(
        _RUN, "write the lanes of the first steps to this file, for ui.perfetto.dev", metavar="PATH"
    )
    trace_steps: int = _setting(_RUN, "steps that the trace covers", 10)
    tensorboard: bool = _setting(_RUN, "also write TensorBoard events into the output folder", False)
    peak_tflops: float | None = _setting(_RUN, "TFLOP/s of a device at best, to show the share reached")
