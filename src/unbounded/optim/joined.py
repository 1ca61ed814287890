"""Several optimizers of one model as one: Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from unbounded.errors import PlanError


class _MemberStates(ChainMap[Any, Any]):
    """The states of all members; each is taken from the member that has it. Others would begin a state if asked."""

    def __getitem__(self, key: Any) -> Any:
        return self._held(key)[key]

    def pop(self, key: Any, *default: Any) -> Any:
        return self._held(key).pop(key, *default)

    def _held(self, key: Any) -> MutableMapping[Any, Any]:
        return next((held for held in self.maps if key in held), {})


class JoinedOptimizer(torch.optim.Optimizer):
    """The param groups of all `members`, one after another: the same dicts, so that their schedulers keep working.

    It does not step by itself: `shard` takes it, and its optimizer steps them all.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        if not members or not all(isinstance(member, torch.optim.Optimizer) for member in members):
            named = ", ".join(type(member).__name__ for member in members) or "nothing"
            raise PlanError(f"optimizer is a list of {named}. Give torch.optim optimizers.")
        self.members = tuple(members)
        super().__init__([group for member in members for group in member.param_groups], {})
        self.param_groups = [group for member in members for group in member.param_groups]
        self.state: Any = _MemberStates(*(member.state for member in members))
        for name, held in vars(self).items():
            if name.endswith("_hooks"):
                for member in members:
                    held.update(vars(member).get(name, {}))

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError
