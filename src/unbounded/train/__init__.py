"""The job of `unbounded train`: `run(Config(...))` does from Python what the command does.

from unbounded.train import Config, run
summary = run(Config(model="folder", data=("data.jsonl",), output="runs/mine"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Config": "unbounded.train.options.config",
    "run": "unbounded.train.training",
    "Summary": "unbounded.train.job.summary",
}

__all__ = ["Config", "Summary", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unbounded.train' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if TYPE_CHECKING:
    from unbounded.train.job.summary import Summary
    from unbounded.train.options.config import Config
    from unbounded.train.training import run
