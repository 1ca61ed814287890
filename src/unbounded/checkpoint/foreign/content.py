"""What a foreign checkpoint holds, whatever wrote it: parameters with their states, each read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Read = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class StoredParameter:
    """One parameter: its weight and, if it is trained, its moments and how often it was updated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Read
    moments: Mapping[str, Read] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class StoredGroup:
    """A param group: the names of its parameters and its options."""

    names: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Content:
    """A whole checkpoint. `aliases` are other names of parameters; `extra` are other plain values in it."""

    origin: str
    parameters: Mapping[str, StoredParameter]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    groups: Sequence[StoredGroup] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
