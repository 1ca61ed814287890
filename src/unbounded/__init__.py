"""Unbounded trains models that do not fit.

The public names are imported on first use, so that `import unbounded` costs nothing.
"""

# The names are exported by __getattr__; type checkers read the imports at the end.
# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "shard": "unbounded.sharding",
    "full_params": "unbounded.sharding",
    "checkpoint_activations": "unbounded.sharding",
    "save": "unbounded.checkpoint.saving",
    "load": "unbounded.checkpoint.loading",
    "export": "unbounded.checkpoint.exporting",
    "trace": "unbounded.observe.trace",
    "Plan": "unbounded.planner.plan",
    "UnboundedError": "unbounded.errors",
    "PlanError": "unbounded.errors",
    "BudgetError": "unbounded.errors",
    "StateError": "unbounded.errors",
    "DiskError": "unbounded.errors",
    "CheckpointError": "unbounded.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unbounded' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from unbounded.checkpoint.exporting import export
    from unbounded.checkpoint.loading import load
    from unbounded.checkpoint.saving import save
    from unbounded.errors import BudgetError, CheckpointError, DiskError, PlanError, StateError, UnboundedError
    from unbounded.observe.trace import trace
    from unbounded.planner.plan import Plan
    from unbounded.sharding import checkpoint_activations, full_params, shard
