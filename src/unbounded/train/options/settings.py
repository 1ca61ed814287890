"""Closes what the user left open, for this machine and model. Nothing below this sees an open setting.

The default job is small enough for two minutes on two CPU cores. Its budgets are smaller than its states, so that all
three tiers are used. A GPU gets a larger job, with enough tokens per step for computing to take longer than moving
states.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from unbounded.errors import InputError
from unbounded.native.host_memory import available_bytes
from unbounded.planner.sizes import format_bytes
from unbounded.train.options.config import Config
from unbounded.train.options.contradictions import plan_fields
from unbounded.train.options.defaults import LORA_LR, size_for

DEFAULT_OUTPUT = "runs/default"
_PATHS = ("model", "from_config", "tokenizer", "data", "eval_data", "disk_path", "output", "export", "trace")
_HOST_BYTES_PER_TOKEN = 17 * 6  # inputs, targets and document marks of the batch in use and of those made ahead


@dataclass(frozen=True)
class Settings(Config):
    """A `Config` with nothing left open. (If epochs were asked for, `steps` is 0 until the data is counted.)"""

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

    def length_at(self, step: int) -> int:
        """Tokens per sequence at a 0-based step: starts at `sequence_start` and doubles up to `sequence_length`."""
        start = self.sequence_start or self.sequence_length
        num_doublings = (self.sequence_length // start).bit_length() - 1
        return start << min(step * num_doublings // max(self.sequence_steps or 1, 1), num_doublings)

    @property
    def shard_plan(self) -> dict[str, Any]:
        """The plan for `unbounded.shard`; what the settings leave open is left to "auto"."""
        return plan_fields(self)


def close_settings(config: Config, *, kind: str, num_ranks: int, device_bytes: int = 0) -> Settings:
    """`config` for a device of `kind`, with this memory, and so many ranks to share the batch. Only the length of the
    run stays open.
    """
    ours = config.model is None and config.from_config is None
    size = size_for(kind, is_given=not ours, device_bytes=device_bytes)
    defaults = asdict(size)
    if config.lora_rank is not None:
        defaults |= {"lr": LORA_LR, "lora_alpha": 2 * config.lora_rank}
    if config.epochs is not None:
        defaults["steps"] = 0
    elif config.steps is None and not ours:
        defaults |= {"steps": 0, "epochs": 1.0}
    defaults["precision"] = dict(config.plan).get("precision", "bf16" if kind == "cuda" else "fp32")
    defaults["activations"] = "host" if ours else "auto"
    defaults |= {"output": DEFAULT_OUTPUT, "device": kind, "eval_fraction": 0.0}
    if config.eval_data is None:
        defaults["eval_fraction"] = (
            0.05 if config.data is None else 0.01
        )  # more of them, because there are few documents
    defaults["sample"] = ("def " if config.data is None else "The ") if ours else ""
    defaults["data"] = default_data()
    given: dict[str, Any] = {one.name: getattr(config, one.name) for one in fields(Config)}
    closed: dict[str, Any] = {key: defaults.get(key) if value is None else value for key, value in given.items()}
    settings = Settings(**{key: _expand(value) if key in _PATHS else value for key, value in closed.items()})
    _check_lengths(settings)
    settings = replace(settings, micro_batch=_micro_batch(settings, config.micro_batch, size.micro_tokens, num_ranks))
    return _close_microbatches(settings, settings.rows // num_ranks)


def close_length(settings: Settings, config: Config, *, tokens_per_epoch: int = 0) -> Settings:
    """`settings` with the number of steps, and whatever follows from it, filled in where `config` leaves it open."""
    steps = settings.steps or max(round((settings.epochs or 1.0) * tokens_per_epoch / settings.batch_tokens), 1)
    every = max(steps // 5, 1)
    by_time_only = config.checkpoint_minutes is not None
    follows = {
        "warmup": max(steps // 20, 1),
        "final_lr": settings.lr / 10,
        "eval_every": every,
        "eval_tokens": 8 * settings.batch_tokens,
        "checkpoint_every": 0 if by_time_only else every,
        "sequence_steps": max(steps // 4, 1),
    }
    closed: dict[str, Any] = {key: value for key, value in follows.items() if getattr(config, key) is None}
    settings = replace(settings, steps=steps, **closed)
    return replace(settings, warmup=min(settings.warmup, steps))


def default_data() -> tuple[str, ...]:
    """The sources of Python's standard library, because every machine has them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return (str(folder / "*.py"), *(str(folder / name / "*.py") for name in ("asyncio", "email", "json", "logging")))


def _expand(path: Any) -> Any:
    """A path, or several, with a leading ~ replaced by the home folder. An unknown user's ~name is a plain name."""
    if not isinstance(path, str):
        return path and tuple(_expand(one) for one in path)
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if expanded.startswith("~") else expanded


def _check_lengths(settings: Settings) -> None:
    length, start = settings.sequence_length, settings.sequence_start
    if start is not None and (length % start or (length // start).bit_count() != 1):
        raise InputError(
            f"--sequence-start {start} cannot be doubled to reach --sequence-length {length}. "
            f"Choose {length} divided by 2, 4, 8 or another power of 2."
        )
    if settings.sequence_overlap >= length:
        raise InputError(
            f"--sequence-overlap {settings.sequence_overlap} leaves nothing new in a sequence of {length} tokens. "
            "Choose less than --sequence-length."
        )


def _check_batch(settings: Settings, rows: int) -> None:
    """Batches are made ahead, so they must fit in host memory."""
    needed, free = rows * settings.sequence_length * _HOST_BYTES_PER_TOKEN, available_bytes()
    if needed > free:
        raise InputError(
            f"--batch-tokens {settings.batch_tokens} takes {format_bytes(needed)} of host memory on each rank, but "
            f"only {format_bytes(free)} are free. Lower it, or use more ranks."
        )


def _close_microbatches(settings: Settings, rows: int) -> Settings:
    """A pipeline runs the `rows` of a rank's batch in one call; the plan says in how many parts."""
    plan = dict(settings.plan)
    if settings.shard_plan.get("pipeline", 1) == 1 or "microbatches" in plan:
        return settings
    return replace(settings, plan=tuple({**plan, "microbatches": rows // settings.micro_batch}.items()))


def _micro_batch(settings: Settings, given: int | None, micro_tokens: int, num_ranks: int) -> int:
    length, tokens = settings.sequence_length, settings.batch_tokens
    if tokens % length:
        raise InputError(
            f"--batch-tokens {tokens} is not a multiple of --sequence-length {length}. "
            f"The nearest multiple is {max(round(tokens / length), 1) * length}."
        )
    if settings.rows % num_ranks:
        raise InputError(
            f"a global batch of {settings.rows} sequences cannot be split evenly over {num_ranks} ranks. "
            f"Choose --batch-tokens so that it holds a multiple of {num_ranks} sequences."
        )
    mine = settings.rows // num_ranks
    _check_batch(settings, mine)
    stages, parts = settings.shard_plan.get("pipeline", 1), settings.shard_plan.get("microbatches")
    if parts is not None and (mine % parts or given not in (None, mine // parts)):
        raise InputError(
            f"--plan microbatches={parts} does not fit the {mine} sequences of a rank's batch"
            + (f" and --micro-batch {given}." if given is not None else ".")
            + f" Choose a number that divides {mine}, and leave out --micro-batch."
        )
    if parts is not None:
        return mine // parts
    if given is None:
        most = min(max(micro_tokens // length, 1), mine)
        if stages > 1:  # enough parts to fill the pipeline
            most = max(min(most, mine // (2 * stages)), 1)
        return next(count for count in range(most, 0, -1) if mine % count == 0)
    if mine % given:
        raise InputError(
            f"--micro-batch {given} does not divide the {mine} sequences of a rank's batch. Choose a divisor of {mine}."
        )
    return given
