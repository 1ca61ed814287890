"""Ranks that do one thing together: either all of them succeed, or all of them raise.

Agreement goes over a group of its own on the host (gloo), so that a save in the background neither waits for nor
disturbs the collectives of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from unbounded.errors import CheckpointError
from unbounded.zero.collectives import Ranks

T = TypeVar("T")


class Peers:
    """The ranks of one model, as a checkpoint sees them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size

    def agree(self, work: Callable[[], T]) -> list[T]:
        """All ranks must call this. Runs `work` on each; every rank's result, or an error on all of them."""
        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        outcomes = self.ranks.objects((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        failures = [f"rank {rank} failed: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failures:
            raise CheckpointError("; ".join(failures))
        return [outcome[0] for outcome in outcomes]


_peers: weakref.WeakKeyDictionary[nn.Module, Peers] = weakref.WeakKeyDictionary()


def peers_of(model: nn.Module, ranks: Ranks) -> Peers:
    """All ranks must call this. The model's peers, with their group made at the first call."""
    if model not in _peers:
        own = ranks
        if ranks.size > 1:
            own = Ranks(dist.new_group(dist.get_process_group_ranks(ranks.group), backend="gloo"))
        _peers[model] = Peers(own)
    return _peers[model]
