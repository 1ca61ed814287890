"""Ranks that do something together: either all of them succeed, or all of them raise.

Agreement goes over its own group on the host (gloo), so that a save in the background neither waits for nor
disturbs the collectives of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from unbounded.ranks.axis import Axis

T = TypeVar("T")


class Peers:
    """The ranks of one model, as a checkpoint sees them; errors call what they do together `what`."""

    def __init__(self, ranks: Axis, what: str) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self._what = what

    def agree(self, work: Callable[[], T]) -> list[T]:
        """All ranks must call this. Runs `work` on each; every rank's result, or an error on all of them."""
        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        return self.ranks.agree(error, result, what=self._what)


_lanes: weakref.WeakKeyDictionary[nn.Module, Axis] = weakref.WeakKeyDictionary()


def peers_of(model: nn.Module, ranks: Axis, what: str) -> Peers:
    """All ranks must call this. The model's peers, with their group made at the first call."""
    if model not in _lanes:
        _lanes[model] = ranks.lane("checkpoint", "gloo")
    return Peers(_lanes[model], what)
