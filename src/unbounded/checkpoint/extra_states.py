"""What modules keep besides parameters and buffers, as `state_dict` has it: `get_extra_state` and `set_extra_state`.

A checkpoint has them among `extra`, under a name that is no argument's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from unbounded.errors import CheckpointError

NAME = "extra states of modules"


def take_extra_states(model: nn.Module) -> dict[str, Any]:
    """What to add to `extra`: nothing if no module has any."""
    found = {name: module.get_extra_state() for name, module in _having(model)}
    return {NAME: found} if found else {}


def pop_extra_states(extra: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Takes them out of what a checkpoint has as `extra`."""
    states = extra.pop(NAME, {})
    if not isinstance(states, dict):
        raise CheckpointError(f"the {NAME} in {folder} are no dict. Load another checkpoint.")
    return states


def put_extra_states(model: nn.Module, states: dict[str, Any], folder: Path) -> None:
    """Gives them to their modules."""
    without = []
    for name, module in _having(model):
        if name in states:
            module.set_extra_state(states[name])
        else:
            without.append(name or "the model itself")
    if without:
        warnings.warn(
            f"the checkpoint in {folder} has no extra state for this rank's {', '.join(without)}, which keep theirs.",
            stacklevel=6,
        )


def _having(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
