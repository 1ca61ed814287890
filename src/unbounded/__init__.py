"""Unbounded trains models that do not fit.

The public names are imported on first use, so that `import unbounded` costs nothing.
"""

# The names are exported by __getattr__; type checkers read the imports at the end.
# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbounded.version import __version__

_HOMES = {
    "shard": "unbounded.sharding.placing",
    "unshard": "unbounded.sharding.placing",
    "full_params": "unbounded.sharding.running",
    "checkpoint_activations": "unbounded.sharding.block_policies",
    "pipeline": "unbounded.sharding.running",
    "tile": "unbounded.zero.parameters.tiles",
    "tiled_cross_entropy": "unbounded.activations.tiled.loss",
    "save": "unbounded.checkpoint.saving",
    "load": "unbounded.checkpoint.loading",
    "export": "unbounded.checkpoint.exporting",
    "import_checkpoint": "unbounded.checkpoint.foreign.importing",
    "trace": "unbounded.observe.trace",
    "Plan": "unbounded.planner.plan",
    "plan": "unbounded.planning.choosing",
    "Machine": "unbounded.machine",
    "UnboundedError": "unbounded.errors",
    "PlanError": "unbounded.errors",
    "BudgetError": "unbounded.errors",
    "StateError": "unbounded.errors",
    "DiskError": "unbounded.errors",
    "CheckpointError": "unbounded.errors",
}

_FRAMEWORKS = ("hf", "lightning", "deepspeed")
"""Parts that are imported whole on first use; each needs its framework only when something of it is used."""

__all__ = ["__version__", *_HOMES, *_FRAMEWORKS]


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return import_module(f"unbounded.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'unbounded' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from unbounded import deepspeed, hf, lightning
    from unbounded.activations.tiled.loss import tiled_cross_entropy
    from unbounded.checkpoint.exporting import export
    from unbounded.checkpoint.foreign.importing import import_checkpoint
    from unbounded.checkpoint.loading import load
    from unbounded.checkpoint.saving import save
    from unbounded.errors import BudgetError, CheckpointError, DiskError, PlanError, StateError, UnboundedError
    from unbounded.machine import Machine
    from unbounded.observe.trace import trace
    from unbounded.planner.plan import Plan
    from unbounded.planning.choosing import plan
    from unbounded.sharding.block_policies import checkpoint_activations
    from unbounded.sharding.placing import shard, unshard
    from unbounded.sharding.running import full_params, pipeline
    from unbounded.zero.parameters.tiles import tile
