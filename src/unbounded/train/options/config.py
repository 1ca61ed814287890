"""Every setting of a training job: one frozen value. Each of its fields is a TOML key and a flag.

A field that is None is open; `settings` closes it for the machine and the model. This file does not import torch, so
that `unbounded train --help` is quick. The bounds of a number are `above` and `below` (excluded), `least` and `most`
(included): a value beyond them is a mistake, or a run that would never end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unbounded.planner.models.shapes import MOST_RANK
from unbounded.train.options.defaults import LORA_LR, show

OBJECTIVES = ("next", "masked")
OPTIMIZERS = (
    *("adamw", "adam", "sgd", "lion", "adagrad", "nadam", "radam", "adamax", "rmsprop", "adadelta"),
    *("adafactor", "lamb", "muon"),
)
DATA_FORMATS = ("auto", "text", "jsonl", "chat", "sharegpt", "alpaca", "prompt", "parquet")
BOARDS = ("tensorboard", "wandb")


def _setting(group: str, help: str, default: Any = None, *, shown: str = "", **extra: Any) -> Any:
    """`shown` is the default in words, for when the value itself does not say it."""
    return field(default=default, metadata={"group": group, "help": help, "shown": shown or str(default), **extra})


GROUPS = _MODEL, _DATA, _BATCH, _OPTIMIZER, _PLACE, _RUN = "model", "data", "batch", "optimizer", "placement", "run"
_MODELS = "of the built-in GPT"


@dataclass(frozen=True)
class Config:
    """What the user asked for."""

    model: str | None = _setting(
        _MODEL, "folder of a Hugging Face model to train", shown="a GPT over bytes", metavar="PATH"
    )
    from_config: str | None = _setting(
        _MODEL, "folder or config.json of a Hugging Face model to train from scratch", shown="none", metavar="PATH"
    )
    tokenizer: str | None = _setting(_MODEL, "folder of the tokenizer", shown="the model's own", metavar="PATH")
    objective: str = _setting(
        _MODEL,
        "what the model predicts: the next token, or masked tokens (for a model such as BERT)",
        "next",
        choices=OBJECTIVES,
    )
    mask_fraction: float = _setting(_MODEL, "share of the tokens that are masked and predicted", 0.15, above=0, below=1)
    layers: int | None = _setting(_MODEL, f"blocks {_MODELS}", shown=show("layers"), least=1, most=10_000)
    width: int | None = _setting(_MODEL, f"width {_MODELS}", shown=show("width"), least=1, most=1 << 20)
    heads: int | None = _setting(_MODEL, f"attention heads {_MODELS}", shown=show("heads"), least=1, most=1 << 20)
    lora_rank: int | None = _setting(
        _MODEL, "train only low-rank peft adapters of this rank", shown="none", least=1, most=MOST_RANK
    )
    lora_alpha: float | None = _setting(_MODEL, "scale of the adapters", shown="twice the rank", above=0)
    lora_dropout: float = _setting(_MODEL, "dropout of the adapters", 0.0, least=0, below=1)
    lora_targets: tuple[str, ...] | None = _setting(
        _MODEL, "names of the layers to adapt", shown="every linear layer except the head"
    )

    data: tuple[str, ...] | None = _setting(
        _DATA, "files, folders or globs", shown="the sources of Python's standard library"
    )
    data_format: str = _setting(_DATA, "what kind of data it is", "auto", choices=DATA_FORMATS)
    text_field: str = _setting(_DATA, "field or column that holds the text", "text")
    messages_field: str | None = _setting(
        _DATA, "field or column that holds a conversation", shown="messages; conversations for ShareGPT data"
    )
    packing: str = _setting(
        _DATA,
        "how documents share a sequence: joined (attention runs across them) or separated (each sees only itself)",
        "joined",
        choices=("joined", "separated"),
    )
    eval_fraction: float | None = _setting(
        _DATA,
        "share of the documents held out for evaluation",
        shown="0.01; of the built-in data, 0.05",
        least=0,
        below=1,
    )
    eval_data: tuple[str, ...] | None = _setting(_DATA, "separate evaluation data, instead of a share", shown="none")
    eval_every: int | None = _setting(
        _DATA, "steps between evaluations; 0 for none", shown="a fifth of the run", least=0
    )
    eval_tokens: int | None = _setting(
        _DATA, "most tokens to evaluate on", shown="those of 8 steps", least=1, most=1 << 32
    )
    restart_data: bool = _setting(
        _DATA, "when resuming, start the data again instead of at the exact sample", False, shown="off"
    )

    sequence_length: int | None = _setting(
        _BATCH, "tokens per sequence", shown=show("sequence_length"), least=1, most=1 << 24
    )
    sequence_start: int | None = _setting(
        _BATCH,
        "tokens per sequence in the first steps; doubles until --sequence-length is reached after --sequence-steps",
        shown="--sequence-length",
        least=1,
        most=1 << 24,
    )
    sequence_steps: int | None = _setting(
        _BATCH, "steps until sequences reach their full length", shown="a quarter of the run", least=1
    )
    sequence_overlap: int = _setting(
        _BATCH,
        "tokens of the same document that a sequence repeats from the one before it, as context without a loss",
        0,
        least=0,
        most=1 << 24,
    )
    batch_tokens: int | None = _setting(
        _BATCH,
        "tokens per step, over all ranks",
        shown=show("batch_tokens"),
        least=1,
        most=1 << 36,
    )
    micro_batch: int | None = _setting(
        _BATCH,
        "sequences a rank runs at once; gradients are accumulated over the rest",
        shown=f"about so many tokens: {show('micro_tokens')}",
        least=1,
    )
    steps: int | None = _setting(
        _BATCH, "optimizer steps", shown=show("steps", "for a given model, one epoch"), least=1, most=10**12
    )
    epochs: float | None = _setting(_BATCH, "passes over the data, instead of steps", shown="none", above=0, most=10**6)

    optimizer: str = _setting(_OPTIMIZER, "which optimizer updates the weights", "adamw", choices=OPTIMIZERS)
    lr: float | None = _setting(
        _OPTIMIZER,
        "peak learning rate",
        shown=show("lr", f"for adapters, {LORA_LR:g}"),
        above=0,
    )
    warmup: int | None = _setting(
        _OPTIMIZER, "steps until the peak learning rate", shown="a twentieth of the run", least=0
    )
    decay: str = _setting(
        _OPTIMIZER, "how the learning rate falls after the warm-up", "cosine", choices=("cosine", "linear", "constant")
    )
    final_lr: float | None = _setting(_OPTIMIZER, "learning rate at the end", shown="a tenth of the peak", least=0)
    weight_decay: float = _setting(
        _OPTIMIZER, "weight decay of matrices; norms, biases and embeddings have none", 0.1, least=0
    )
    beta1: float = _setting(_OPTIMIZER, "first beta of Adam, its variants and Lion", 0.9, least=0, below=1)
    beta2: float = _setting(_OPTIMIZER, "second beta of Adam, its variants and Lion", 0.95, least=0, below=1)
    eps: float = _setting(_OPTIMIZER, "small number that keeps the optimizer from dividing by 0", 1e-8, above=0)
    momentum: float = _setting(_OPTIMIZER, "momentum of SGD and RMSprop", 0.9, least=0, below=1)
    clip: float = _setting(_OPTIMIZER, "largest gradient norm; 0 for no clipping", 1.0, least=0)
    on_nan: str = _setting(
        _OPTIMIZER, "what to do when a loss or gradient is not finite", "stop", choices=("stop", "skip")
    )

    precision: str | None = _setting(
        _PLACE, "number format of the weights", shown="bf16 on a GPU, otherwise fp32", choices=("bf16", "fp16", "fp32")
    )
    activations: str | None = _setting(
        _PLACE,
        "what happens to activations between forward and backward: keep them, recompute them, recompute them from "
        "inputs on the host, or the first of these that the GPU has room for",
        shown="auto; for the built-in GPT, host",
        choices=("auto", "keep", "recompute", "host"),
    )
    threads: int | None = _setting(
        _PLACE,
        "CPU threads for torch; a resumed run keeps its number, because the last bits depend on it",
        shown="OMP_NUM_THREADS, otherwise torch's own",
        least=1,
        most=4096,
    )
    device: str | None = _setting(_PLACE, "where to compute", shown="cuda if there is a GPU", choices=("cpu", "cuda"))
    device_bytes: str | None = _setting(
        _PLACE, 'device memory to use, such as "24GiB"', shown="what is free", metavar="SIZE"
    )
    host_bytes: str | None = _setting(_PLACE, "host memory to use", shown="what is free", metavar="SIZE")
    disk_bytes: str | None = _setting(_PLACE, "disk space to use", shown="what is free", metavar="SIZE")
    disk_path: tuple[str, ...] | None = _setting(_PLACE, "folders for states on disk", shown="a temporary folder")
    tensor: int | None = _setting(
        _PLACE, "ranks that each hold a part of every layer", shown="1", least=1, most=1 << 20
    )
    pipeline: int | None = _setting(
        _PLACE, "ranks that each hold some of the blocks, in stages", shown="1", least=1, most=1 << 20
    )
    context: int | None = _setting(
        _PLACE, "ranks that each hold a part of every sequence", shown="1", least=1, most=1 << 20
    )
    plan: tuple[tuple[str, Any], ...] = _setting(
        _PLACE,
        "any other field of the plan, such as weights=host optimizer=disk",
        (),
        shown="what the planner chooses",
        keyed=True,
    )

    output: str | None = _setting(_RUN, "folder for checkpoints and metrics", shown="runs/default", metavar="PATH")
    resume: str = _setting(
        _RUN, "whether to continue from the last checkpoint in --output", "auto", choices=("auto", "must", "never")
    )
    checkpoint_every: int | None = _setting(
        _RUN, "steps between checkpoints; 0 for only one, at the end", shown="a fifth of the run", least=0
    )
    checkpoint_minutes: float | None = _setting(
        _RUN, "minutes between checkpoints, in addition to --checkpoint-every or instead of it", shown="none", above=0
    )
    keep_last: int = _setting(_RUN, "checkpoints to keep", 2, least=1)
    export: str | None = _setting(
        _RUN, "folder to export the trained model to, for from_pretrained", shown="none", metavar="PATH"
    )
    sample: str | None = _setting(
        _RUN, "text to continue at the end; empty for none", shown='none; for the built-in GPT, "def "', metavar="TEXT"
    )
    sample_tokens: int = _setting(_RUN, "tokens of the sample", 200, least=0, most=100_000)
    seed: int = _setting(_RUN, "seed of the weights, the order of the data and the sample", 0, least=0, most=2**63 - 1)
    log_every: int = _setting(_RUN, "steps between lines if the output is not a terminal", 10, least=1)
    trace: str | None = _setting(
        _RUN, "write the lanes of the first steps to this file, for ui.perfetto.dev", shown="none", metavar="PATH"
    )
    trace_steps: int = _setting(_RUN, "steps that the trace covers", 10, least=1)
    report_to: tuple[str, ...] = _setting(
        _RUN, "also write the metrics for tensorboard or wandb", (), shown="none", choices=BOARDS
    )
    peak_tflops: float | None = _setting(
        _RUN, "peak TFLOP/s of a device, to show the share that is reached", shown="none", above=0
    )
