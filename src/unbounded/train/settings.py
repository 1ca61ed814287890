"""Closes what the user left open, for the machine and the model at hand: below this nothing meets an open setting.

The default job is small enough for two CPU cores and two minutes, and its budgets are smaller than its states, so that
all three tiers are at work. A GPU gets a larger one.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from unbounded.train.config import Config
from unbounded.train.errors import InputError

DEFAULT_OUTPUT = "runs/default"
_SMALL = {"layers": 6, "width": 192, "heads": 6, "sequence_length": 128, "batch_tokens": 1024, "steps": 320, "lr": 1e-3}
_LARGE = {"layers": 16, "width": 1024, "heads": 16, "sequence_length": 1024, "batch_tokens": 8192, "lr": 6e-4}
_HF = {"layers": 0, "width": 0, "heads": 0, "sequence_length": 1024, "batch_tokens": 16_384, "lr": 2e-5}
_LARGE_STEPS = 240
_LORA_LR = 2e-4
_MICRO_TOKENS = 8192  # a rank runs about this many tokens at once unless told


@dataclass(frozen=True)
class Settings(Config):
    """A `Config` with nothing left open (`steps` is 0 until the data is counted, where epochs were asked for)."""

    layers: int = 0
    width: int = 0
    heads: int = 0
    data: tuple[str, ...] = ()
    eval_fraction: float = 0.0
    eval_every: int = 0
    eval_tokens: int = 0
    sequence_length: int = 0
    batch_tokens: int = 0
    micro_batch: int = 0
    steps: int = 0
    lr: float = 0.0
    warmup: int = 0
    final_lr: float = 0.0
    precision: str = ""
    activations: str = ""
    device: str = ""
    output: str = ""
    checkpoint_every: int = 0
    sample: str = ""

    @property
    def rows(self) -> int:
        """Sequences of a global batch."""
        return self.batch_tokens // self.sequence_length

    @property
    def shard_plan(self) -> dict[str, Any]:
        """The plan that the settings ask of `unbounded.shard`; what they leave open is left to "auto"."""
        keys = ("precision", "activations", "device_bytes", "host_bytes", "disk_bytes", "disk_path")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None} | dict(self.plan)


def close_settings(config: Config, *, kind: str, world_size: int) -> Settings:
    """`config` for a device of `kind` and this many ranks, all closed but what depends on the length of the run."""
    ours = config.model is None and config.from_config is None
    defaults: dict[str, Any] = dict((_SMALL if kind == "cpu" else _LARGE) if ours else _HF)
    if ours and kind != "cpu":
        defaults["steps"] = _LARGE_STEPS
    if config.lora_rank is not None:
        defaults["lr"] = _LORA_LR
    if config.epochs is not None:
        defaults["steps"] = 0
    elif config.steps is None and not ours:
        defaults |= {"steps": 0, "epochs": 1.0}
    defaults["precision"] = dict(config.plan).get("precision", "bf16" if kind == "cuda" else "fp32")
    defaults["activations"] = "host" if ours else "auto"
    defaults |= {"output": DEFAULT_OUTPUT, "device": kind, "eval_fraction": 0.0}
    if config.eval_data is None:
        defaults["eval_fraction"] = 0.05 if config.data is None else 0.01  # of few documents, more
    defaults["sample"] = ("def " if config.data is None else "The ") if ours else ""
    defaults["data"] = default_data()
    given: dict[str, Any] = {one.name: getattr(config, one.name) for one in fields(Config)}
    closed: dict[str, Any] = {key: defaults.get(key) if value is None else value for key, value in given.items()}
    settings = Settings(**closed)
    return replace(settings, micro_batch=_micro_batch(settings, config.micro_batch, world_size))


def close_length(settings: Settings, config: Config, *, tokens_per_epoch: int = 0) -> Settings:
    """`settings` with its number of steps and all that follows from it, where `config` leaves that open."""
    steps = settings.steps or max(round((settings.epochs or 1.0) * tokens_per_epoch / settings.batch_tokens), 1)
    every = max(steps // 5, 1)
    by_time_only = config.checkpoint_minutes is not None
    follows = {
        "warmup": max(steps // 20, 1),
        "final_lr": settings.lr / 10,
        "eval_every": every,
        "eval_tokens": 8 * settings.batch_tokens,
        "checkpoint_every": 0 if by_time_only else every,
    }
    closed: dict[str, Any] = {key: value for key, value in follows.items() if getattr(config, key) is None}
    settings = replace(settings, steps=steps, **closed)
    return replace(settings, warmup=min(settings.warmup, steps))


def default_data() -> tuple[str, ...]:
    """The sources of Python's own standard library: text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return (str(folder / "*.py"), *(str(folder / name / "*.py") for name in ("asyncio", "email", "json", "logging")))


def _micro_batch(settings: Settings, given: int | None, world_size: int) -> int:
    length, tokens = settings.sequence_length, settings.batch_tokens
    if tokens % length:
        raise InputError(
            f"--batch-tokens {tokens} is not a multiple of --sequence-length {length}. "
            f"The nearest that is: {max(round(tokens / length), 1) * length}."
        )
    if settings.rows % world_size:
        raise InputError(
            f"a global batch of {settings.rows} sequences cannot be split evenly over {world_size} ranks. "
            f"Choose --batch-tokens so that it holds a multiple of {world_size} sequences."
        )
    mine = settings.rows // world_size
    if given is None:
        most = max(_MICRO_TOKENS // length, 1)
        return max(count for count in range(1, mine + 1) if mine % count == 0 and count <= most)
    if mine % given:
        raise InputError(
            f"--micro-batch {given} does not divide the {mine} sequences of a rank's batch. Choose one that does."
        )
    return given
