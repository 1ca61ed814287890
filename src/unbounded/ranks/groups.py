"""The process groups besides an axis' own: made once per job, and used by one model after another.

A group costs threads and file descriptors on every rank and cannot be shared: two models whose lanes ran on one
would meet in different orders on different ranks. So a model takes a set of them, and returns it when it is freed. That
happens at different times on different ranks, so the ranks ask each other which set is free on all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


@dataclass(eq=False)
class _Set:
    """The groups that one model uses besides an axis' own, by purpose and backend."""

    is_taken: bool = False
    groups: dict[tuple[str, str | None], dist.ProcessGroup] = field(default_factory=dict)

    def give_back(self) -> None:
        self.is_taken = False


class GroupLease:
    """A set of groups while a model has it."""

    def __init__(self, taken: _Set) -> None:
        self._set = taken
        weakref.finalize(self, taken.give_back).atexit = False

    def group(self, purpose: str, ranks: list[int], backend: str | None) -> dist.ProcessGroup:
        """All ranks of the axis must call this. The group for `purpose`, made at the first call."""
        groups, key = self._set.groups, (purpose, backend)
        if key not in groups:
            made: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            groups[key] = made
        return groups[key]


# By the job's process group, because they end with it; then by the name of the axis' own group.
_sets: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, list[_Set]]] = weakref.WeakKeyDictionary()


def take_lease(axis_group: str, exchange: Callable[[Any], list[Any]]) -> GroupLease:
    """All ranks of the axis must call this. The first set that no model uses on any rank, or a new one."""
    world = dist.group.WORLD
    assert world is not None
    sets = _sets.setdefault(world, {}).setdefault(axis_group, [])
    free = _free_everywhere(sets, exchange)
    if not free and sets:
        gc.collect()  # a model that nobody holds any more may still be in a cycle
        free = _free_everywhere(sets, exchange)
    if not free:
        sets.append(_Set())
        free = [len(sets) - 1]
    sets[free[0]].is_taken = True
    return GroupLease(sets[free[0]])


def _free_everywhere(sets: list[_Set], exchange: Callable[[Any], list[Any]]) -> list[int]:
    own = [number for number, one in enumerate(sets) if not one.is_taken]
    return sorted(set(own).intersection(*exchange(own)))
