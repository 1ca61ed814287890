"""The small part of an optimizer as a state dict that frameworks save and load: groups, counters, loss scale.

The states themselves (moments, masters) stay on their tiers and go through `unbounded.save` and `unbounded.load`. The
state dict says so, and has the step count of the states: an optimizer whose states are of another step refuses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from unbounded.errors import StateError
from unbounded.zero.step.loss_scale import LossScale
from unbounded.zero.unit import Unit

KEY = "unbounded"
_WHERE = "moments and masters are not in here: unbounded.save(folder, model, optimizer) saves them"


class Counters(Protocol):
    """The small part of a sharded optimizer."""

    kind: str
    param_groups: list[dict[str, Any]]
    loss_scale: LossScale | None
    skipped_steps: int


def describe(optimizer: Counters, units: Sequence[Unit]) -> dict[str, Any]:
    """Counters and the loss scale, and where everything else is."""
    scale = optimizer.loss_scale
    return {
        "states": _WHERE,
        "kind": optimizer.kind,
        "steps": _steps(units),
        "skipped_steps": optimizer.skipped_steps,
        "loss_scale": None if scale is None else asdict(scale),
    }


def warn_of_lack(units: Sequence[Unit]) -> None:
    """Tells whoever asks for a state dict, perhaps to save it, what is not in it; once for each place in their code."""
    steps = _steps(units)
    if steps:
        warnings.warn(
            f"optimizer.state_dict() has groups and counters, but not the states of {steps} steps (moments, masters), "
            "without which no run can go on from a file of it: unbounded.save(folder, model, optimizer) saves all.",
            stacklevel=3,
        )


def restore(optimizer: Counters, units: Sequence[Unit], state_dict: dict[str, Any]) -> None:
    """Takes groups, counters and scale from `state_dict`; raises before anything is changed if they do not fit."""
    groups, ours = state_dict.get("param_groups"), state_dict.get(KEY)
    if not isinstance(groups, list):
        raise StateError("this is not an optimizer's state_dict: it has no param_groups.")
    if state_dict.get("state") or not isinstance(ours, dict):
        raise StateError(
            "this state_dict comes from an optimizer that was not sharded and holds its states whole. Load it into "
            "the torch.optim optimizer before `shard`, which takes the states over."
        )
    here, there = ([len(group["params"]) for group in held] for held in (optimizer.param_groups, groups))
    if here != there or ours["kind"] != optimizer.kind:
        raise StateError(
            f"the state_dict is of {ours['kind']} with groups of {there} parameters, and this is {optimizer.kind} with "
            f"groups of {here}. Build the optimizer that it was saved from."
        )
    if ours["steps"] != _steps(units):
        raise StateError(
            f"the state_dict was taken after step {ours['steps']}, but the states here are those after step "
            f"{_steps(units)}, and it does not hold any. Load them first: unbounded.load(folder, model, optimizer)."
        )
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: deepcopy(value) for name, value in options.items() if name != "params"})
    if optimizer.loss_scale is not None and ours["loss_scale"] is not None:
        optimizer.loss_scale = LossScale(**ours["loss_scale"])
    optimizer.skipped_steps = ours["skipped_steps"]


def _steps(units: Sequence[Unit]) -> int:
    """The step count of the parameter that was updated most often."""
    return max((int(np.max(unit.steps, initial=0)) for unit in units), default=0)
