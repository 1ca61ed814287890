"""Turns Lightning's checkpoint dict into plain values, which our checkpoints hold without pickle."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

import torch


def as_plain(value: Any) -> Any:
    """`value` with frameworks' own classes of dicts, paths and enumerations turned into Python's."""
    if isinstance(value, Mapping):
        return {as_plain(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(as_plain(item) for item in value) if type(value) in (list, tuple, set) else list(value)
    if isinstance(value, enum.Enum):
        return as_plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    return value
