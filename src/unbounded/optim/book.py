"""The rules of one optimizer, or of several joined. Each kind of unit gets one before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unbounded.errors import PlanError
from unbounded.optim.class_rules import ClassRule
from unbounded.optim.granularity import Granularity
from unbounded.optim.joined import JoinedOptimizer
from unbounded.optim.muon import MuonRule
from unbounded.optim.recognition import Recognised, recognise
from unbounded.optim.rules import NATIVE, NativeRule, UpdateRule
from unbounded.optim.trial import try_declared


class RuleBook:
    """Gives every unit its rule. Units that keep the same states share one."""

    def __init__(self, optimizer: torch.optim.Optimizer, optimizer_format: str) -> None:
        members = optimizer.members if isinstance(optimizer, JoinedOptimizer) else (optimizer,)
        self._members = [(member, recognise(member)) for member in members]
        self._of_group = [number for number, member in enumerate(members) for _ in member.param_groups]
        self._format = optimizer_format
        self._rules: dict[object, UpdateRule] = {}
        for member, known in self._members:
            if any(isinstance(g.get("lr"), torch.Tensor) and g["lr"].numel() != 1 for g in member.param_groups):
                raise PlanError("a param group has a learning rate of several elements. Give one number per group.")
            if known.is_declared:
                try_declared(member, known)

    @property
    def num_members(self) -> int:
        return len(self._members)

    def member_of(self, group: int) -> int:
        """The number of the optimizer that a param group belongs to; if there are several, -1 for what is in none."""
        return self._of_group[group] if group >= 0 else 0 if self.num_members == 1 else -1

    def kind(self, member: int) -> str:
        return self._members[member][1].kind

    def rule(self, member: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> UpdateRule | None:
        """The rule for a unit of `dtype` with parameters of `shapes`; None if nobody updates it.

        If there cannot be one, the error says why.
        """
        if member < 0:
            return None
        optimizer, known = self._members[member]
        is_whole = known.granularity is Granularity.TENSOR
        dims = frozenset(max(1, len(shape)) for shape in shapes) if is_whole else frozenset({1})
        key = (member, dtype, dims)
        if key not in self._rules:
            self._rules[key] = self._read(optimizer, known, dtype, dims)
        return self._rules[key]

    def _read(
        self, optimizer: torch.optim.Optimizer, known: Recognised, dtype: torch.dtype, dims: frozenset[int]
    ) -> UpdateRule:
        groups = optimizer.param_groups
        check_trained(dtype)
        is_native = known.kind in NATIVE and not known.has_own_step
        if dtype != torch.float64 and is_native and not any(group.get("amsgrad") for group in groups):
            initial_sum = float(optimizer.defaults.get("initial_accumulator_value", 0.0))  # groups' own are not used
            return NativeRule(known.kind, groups, dtype, self._format, initial_sum=initial_sum)
        if known.kind == "Lion" and is_native:
            raise PlanError(f"Lion has no kernel for parameters of {dtype}. Convert them to float32.")
        if self._format == "compact" and dtype != torch.float32:
            raise PlanError(f'{known.kind} has no "compact" format. Use optimizer_format="exact", or AdamW.')
        kind = MuonRule if known.kind == "Muon" and not known.has_own_step else ClassRule
        return kind(optimizer, groups, dtype, granularity=known.granularity, dims=dims)


def check_trained(dtype: torch.dtype) -> None:
    """Raises if parameters of `dtype` cannot be trained."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise PlanError(
            f"parameters of {dtype} cannot be trained. Freeze them, or convert them to a float dtype first."
        )
