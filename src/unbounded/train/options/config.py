"""Every setting of a training job: one frozen value, each field of it a TOML key and a flag.

A field left None is open; `settings` closes it for the machine and model at hand. Kept free of torch, so that
`unbounded train --help` is quick. The bounds of a number are `above` and `below` (excluded), `least` and `most`
(included): a value beyond them cannot be meant, or would never end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OBJECTIVES = ("next", "masked")
OPTIMIZERS = (
    *("adamw", "adam", "sgd", "lion", "adagrad", "nadam", "radam", "adamax", "rmsprop", "adadelta"),
    *("adafactor", "lamb", "muon"),
)
FORMATS = ("auto", "text", "jsonl", "chat", "sharegpt", "alpaca", "prompt", "parquet")
BOARDS = ("tensorboard", "wandb")


def _setting(group: str, help: str, default: Any = None, *, shown: str = "", **extra: Any) -> Any:
    """`shown` is the default in words, where the value itself does not say it."""
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
        _MODEL, "folder or config.json of a Hugging Face model to start from nothing", shown="none", metavar="PATH"
    )
    tokenizer: str | None = _setting(_MODEL, "folder of the tokenizer", shown="the model's own", metavar="PATH")
    objective: str = _setting(
        _MODEL,
        "what is learned: the next token, or (of a model such as BERT) tokens that are masked",
        "next",
        choices=OBJECTIVES,
    )
    mask_fraction: float = _setting(_MODEL, "share of the tokens that are masked and asked for", 0.15, above=0, below=1)
    layers: int | None = _setting(_MODEL, f"blocks {_MODELS}", shown="6, on a GPU 16", least=1, most=10_000)
    width: int | None = _setting(_MODEL, f"width {_MODELS}", shown="192, on a GPU 1024", least=1, most=1 << 20)
    heads: int | None = _setting(_MODEL, f"attention heads {_MODELS}", shown="6, on a GPU 16", least=1, most=1 << 20)
    lora_rank: int | None = _setting(
        _MODEL, "train low-rank adapters of this rank with peft, the rest frozen", shown="none", least=1, most=1 << 16
    )
    lora_alpha: float | None = _setting(_MODEL, "scale of the adapters", shown="twice the rank")
    lora_dropout: float = _setting(_MODEL, "dropout of the adapters", 0.0, least=0, below=1)
    lora_targets: tuple[str, ...] | None = _setting(
        _MODEL, "names of the layers to adapt", shown="every linear layer but the head"
    )

    data: tuple[str, ...] | None = _setting(
        _DATA, "files, folders or globs", shown="the sources of Python's standard library"
    )
    data_format: str = _setting(_DATA, "how to read them", "auto", choices=FORMATS)
    text_field: str = _setting(_DATA, "field or column that holds the text", "text")
    messages_field: str | None = _setting(
        _DATA, "field or column that holds a conversation", shown="messages, of ShareGPT data conversations"
    )
    packing: str = _setting(
        _DATA,
        "documents that share a sequence: joined (attention runs across them) or separated (each sees itself alone)",
        "joined",
        choices=("joined", "separated"),
    )
    eval_fraction: float | None = _setting(
        _DATA,
        "share of the documents held out for evaluation",
        shown="0.01, of the built-in data 0.05",
        least=0,
        below=1,
    )
    eval_data: tuple[str, ...] | None = _setting(_DATA, "evaluation data of its own, instead of a share", shown="none")
    eval_every: int | None = _setting(_DATA, "steps between evaluations; 0: none", shown="a fifth of the run", least=0)
    eval_tokens: int | None = _setting(
        _DATA, "tokens of one evaluation, at most", shown="those of 8 steps", least=1, most=1 << 32
    )
    restart_data: bool = _setting(
        _DATA, "when resuming, begin the data anew instead of at the exact sample", False, shown="off"
    )

    sequence_length: int | None = _setting(
        _BATCH, "tokens of a sequence", shown="128, on a GPU or of a given model 1024", least=1, most=1 << 24
    )
    sequence_start: int | None = _setting(
        _BATCH,
        "tokens of a sequence in the first steps: it slides up to --sequence-length, doubling, over --sequence-steps",
        shown="--sequence-length",
        least=1,
        most=1 << 24,
    )
    sequence_steps: int | None = _setting(
        _BATCH, "steps until sequences have their full length", shown="a quarter of the run", least=1
    )
    sequence_overlap: int = _setting(
        _BATCH,
        "tokens that a sequence repeats of the one before it in the same document, as context without a loss",
        0,
        least=0,
        most=1 << 24,
    )
    batch_tokens: int | None = _setting(
        _BATCH,
        "tokens of a step over all ranks",
        shown="1024; on a GPU 8192, of a given model 16384",
        least=1,
        most=1 << 36,
    )
    micro_batch: int | None = _setting(
        _BATCH, "sequences a rank runs at once; the rest is accumulated", shown="about 8192 tokens", least=1
    )
    steps: int | None = _setting(
        _BATCH, "optimizer steps", shown="320, on a GPU 240; of a given model one epoch", least=1, most=10**12
    )
    epochs: float | None = _setting(_BATCH, "passes over the data, instead of steps", shown="none", above=0, most=10**6)

    optimizer: str = _setting(_OPTIMIZER, "how weights are updated", "adamw", choices=OPTIMIZERS)
    lr: float | None = _setting(
        _OPTIMIZER, "peak learning rate", shown="1e-3, on a GPU 6e-4; of a given model 2e-5, of adapters 2e-4", above=0
    )
    warmup: int | None = _setting(_OPTIMIZER, "steps to reach it", shown="a twentieth of the run", least=0)
    decay: str = _setting(_OPTIMIZER, "how it falls after that", "cosine", choices=("cosine", "linear", "constant"))
    final_lr: float | None = _setting(_OPTIMIZER, "learning rate at the end", shown="a tenth of the peak", least=0)
    weight_decay: float = _setting(_OPTIMIZER, "of matrices; norms, biases and embeddings have none", 0.1, least=0)
    beta1: float = _setting(_OPTIMIZER, "first beta of Adam and its kin, and of Lion", 0.9, least=0, below=1)
    beta2: float = _setting(_OPTIMIZER, "second beta of Adam and its kin, and of Lion", 0.95, least=0, below=1)
    eps: float = _setting(_OPTIMIZER, "what keeps the optimizer from dividing by 0", 1e-8, above=0)
    momentum: float = _setting(_OPTIMIZER, "momentum of SGD and RMSprop", 0.9, least=0, below=1)
    clip: float = _setting(_OPTIMIZER, "largest norm of the gradient; 0: any", 1.0, least=0)
    on_nan: str = _setting(
        _OPTIMIZER, "what a loss or gradient that is not finite does", "stop", choices=("stop", "skip")
    )

    precision: str | None = _setting(
        _PLACE, "number format of the weights", shown="bf16 on a GPU, otherwise fp32", choices=("bf16", "fp16", "fp32")
    )
    activations: str | None = _setting(
        _PLACE,
        "between a block's forward and backward: keep them, recompute them, have its input on the host too, or the "
        "first of these that a GPU has room for",
        shown="auto; of the built-in GPT host",
        choices=("auto", "keep", "recompute", "host"),
    )
    threads: int | None = _setting(
        _PLACE,
        "CPU threads that torch computes with; a resumed run keeps its number, on which last bits depend",
        shown="OMP_NUM_THREADS, otherwise torch's own",
        least=1,
        most=4096,
    )
    device: str | None = _setting(_PLACE, "where to compute", shown="cuda if there is a GPU", choices=("cpu", "cuda"))
    device_bytes: str | None = _setting(
        _PLACE, 'device memory to use, as "24GiB"', shown="what is free", metavar="SIZE"
    )
    host_bytes: str | None = _setting(_PLACE, "host memory to use", shown="what is free", metavar="SIZE")
    disk_bytes: str | None = _setting(_PLACE, "disk to use", shown="what is free", metavar="SIZE")
    disk_path: tuple[str, ...] | None = _setting(_PLACE, "folders to put states in", shown="a temporary one")
    tensor: int | None = _setting(_PLACE, "ranks that each hold a part of all layers", shown="1", least=1, most=1 << 20)
    pipeline: int | None = _setting(
        _PLACE, "ranks that each hold some of the blocks, in stages", shown="1", least=1, most=1 << 20
    )
    context: int | None = _setting(
        _PLACE, "ranks that each hold a part of every sequence", shown="1", least=1, most=1 << 20
    )
    plan: tuple[tuple[str, Any], ...] = _setting(
        _PLACE,
        "any other field of the plan, as key=value: weights=host optimizer=disk",
        (),
        shown="what the planner chooses",
        keyed=True,
    )

    output: str | None = _setting(_RUN, "folder for checkpoints and metrics", shown="runs/default", metavar="PATH")
    resume: str = _setting(_RUN, "go on from the last checkpoint there", "auto", choices=("auto", "must", "never"))
    checkpoint_every: int | None = _setting(
        _RUN, "steps between checkpoints; 0: only at the end", shown="a fifth of the run", least=0
    )
    checkpoint_minutes: float | None = _setting(
        _RUN, "minutes between checkpoints, also or instead", shown="none", above=0
    )
    keep_last: int = _setting(_RUN, "checkpoints to keep", 2, least=1)
    export: str | None = _setting(
        _RUN, "folder to export the trained model to, for from_pretrained", shown="none", metavar="PATH"
    )
    sample: str | None = _setting(
        _RUN, "text to continue at the end; empty: none", shown='none; of the built-in GPT "def "', metavar="TEXT"
    )
    sample_tokens: int = _setting(_RUN, "tokens of that sample", 200, least=0, most=100_000)
    seed: int = _setting(_RUN, "of the weights, the order of the data and the sample", 0, least=0, most=2**63 - 1)
    log_every: int = _setting(_RUN, "steps between lines where the output is no terminal", 10, least=1)
    trace: str | None = _setting(
        _RUN, "write the lanes of the first steps to this file, for ui.perfetto.dev", shown="none", metavar="PATH"
    )
    trace_steps: int = _setting(_RUN, "steps that the trace covers", 10, least=1)
    report_to: tuple[str, ...] = _setting(
        _RUN, "also write the metrics for these: tensorboard, wandb", (), shown="none", choices=BOARDS
    )
    peak_tflops: float | None = _setting(
        _RUN, "TFLOP/s of a device at best, to show the share reached", shown="none", above=0
    )
