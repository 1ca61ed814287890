"""Small training jobs for the tests: settings, and runs on ranks of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbounded.observe.metrics import read_metrics
from unbounded.train.job.summary import Summary
from unbounded.train.options.config import Config
from unbounded.train.training import run


def tiny(output: Path, data: Path, **settings: Any) -> Config:
    """A GPT of two blocks, six steps of eight sequences, states on all three tiers."""
    given = {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "sequence_length": 32,
        "batch_tokens": 256,
        "steps": 6,
        "lr": 1e-2,
        "eps": 1e-5,  # at 1e-8 Adam's first step is the sign of a gradient, even of one that is only rounding
        "eval_fraction": 0.0,
        "sample": "",
        "device": "cpu",
        "plan": (("weights", "host"), ("optimizer", "disk")),
    }
    return Config(output=str(output), data=(str(data),), **given | settings)


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl")]


def train(config: Config) -> Summary:
    return run(config)


def train_on_rank(rank: int, world_size: int, config: Config) -> int:
    return run(config).step
