"""Checks that settings do not contradict each other. Each one by itself is checked before (`fitting`)."""

from __future__ import annotations

from typing import Any

from unbounded.errors import InputError
from unbounded.planner.plan import read_plan
from unbounded.train.options.config import Config
from unbounded.train.options.fitting import flag_of

EXCLUSIVE = (("model", "from_config"), ("steps", "epochs"), ("eval_fraction", "eval_data"))
"""Pairs that say the same thing in two ways."""

PLANNED = (
    *("precision", "activations", "device_bytes", "host_bytes", "disk_bytes", "disk_path"),
    *("tensor", "pipeline", "context"),
)
"""Settings that are also fields of the plan."""


def check(config: Config) -> None:
    """Refuse settings that contradict each other or make no sense."""
    for one, other in (*EXCLUSIVE, ("from_config", "lora_rank")):
        if getattr(config, one) is not None and getattr(config, other) is not None:
            raise InputError(f"{flag_of(one)} and {flag_of(other)} contradict each other. Give one of them.")
    _check_model(config)
    for key in PLANNED:
        if getattr(config, key) is not None and key in dict(config.plan):
            raise InputError(f"{flag_of(key)} and --plan {key}=... contradict each other. Give one of them.")
    plan = read_plan(plan_fields(config))  # refuses an invalid plan before anything is built
    if not plan.keeps_gradients:
        raise InputError(
            "--plan gradients=none stores no gradient, but this job judges every step by the norm of its gradient. "
            "Leave it out, or call unbounded.shard in a loop of your own."
        )
    _check_numbers(config)


def plan_fields(config: Config) -> dict[str, Any]:
    """The plan for `unbounded.shard`; what the settings leave open is left to "auto"."""
    return {key: getattr(config, key) for key in PLANNED if getattr(config, key) is not None} | dict(config.plan)


def _check_model(config: Config) -> None:
    ours = config.model is None and config.from_config is None
    for key in ("layers", "width", "heads"):
        if not ours and getattr(config, key) is not None:
            raise InputError(
                f"{flag_of(key)} shapes the built-in GPT, but a Hugging Face model was given. Leave it out."
            )
    for key in ("tokenizer", "lora_rank", "export"):
        if ours and getattr(config, key) is not None:
            raise InputError(
                f"{flag_of(key)} needs a Hugging Face model, but none was given. Give --model or --from-config."
            )
    if config.lora_rank is None and (config.lora_alpha, config.lora_targets) != (None, None):
        raise InputError("--lora-alpha and --lora-targets do nothing without --lora-rank. Give it too.")
    if config.objective == "masked":
        _check_masked(config, ours=ours)
    if not ours and config.data is None:
        raise InputError("a Hugging Face model needs data to train on. Give --data.")


def _check_masked(config: Config, *, ours: bool) -> None:
    if ours:
        raise InputError(
            "--objective masked needs a model such as BERT, but the built-in GPT cannot see later tokens. "
            "Give --model or --from-config."
        )
    for key in ("lora_rank", "sample"):
        if getattr(config, key):
            raise InputError(
                f"{flag_of(key)} is for models that predict the next token, but --objective masked was "
                "given. Leave out one of them."
            )


def _check_numbers(config: Config) -> None:
    if config.steps is not None and config.warmup is not None and config.warmup > config.steps:
        raise InputError(f"--warmup {config.warmup} is longer than the run of --steps {config.steps}. Shorten it.")
    if config.sequence_steps is not None and config.sequence_start is None:
        raise InputError("--sequence-steps does nothing without --sequence-start. Give it too.")
    if config.sequence_overlap and config.sequence_start is not None:
        raise InputError("--sequence-overlap and --sequence-start contradict each other. Give one of them.")
