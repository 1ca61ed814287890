"""A param group that is added to a sharded optimizer: where its parameters are, and whether their states fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unbounded.errors import StateError
from unbounded.optim.book import RuleBook
from unbounded.optim.joined import JoinedOptimizer
from unbounded.optim.recognition import kind_of
from unbounded.ranks.phases import describe_groups
from unbounded.zero.engine import Engine
from unbounded.zero.parameters.parameter import ManagedParameter
from unbounded.zero.parameters.tiled_parameter import parts_of
from unbounded.zero.unit import Unit


def find_places(group: dict[str, Any], engine: Engine) -> dict[Unit, list[int]]:
    """All ranks must call this. Where the parameters of the group are, the same on every rank."""
    if engine.axes.pipeline.size > 1:
        raise StateError("a group cannot be added to an optimizer over pipeline stages. Add it before `shard`.")
    places: dict[Unit, list[int]] = {}
    names = []
    for parameter in (part for whole in group["params"] for part in parts_of(whole)):
        if not isinstance(parameter, ManagedParameter) or parameter._unit not in engine.units:
            raise StateError(
                "a parameter of the new group is not one of the sharded model. Add parameters to the model before "
                "`shard`."
            )
        places.setdefault(parameter._unit, []).append(parameter._index)
        names.append(parameter.name)
    options = describe_groups(f"params={names!r}", [{key: value for key, value in group.items() if key != "params"}])
    with engine.phases.together("optimizer.add_param_group()", options):
        return places


def check_states(optimizer: torch.optim.Optimizer, optimizer_format: str, units: Iterable[Unit]) -> None:
    """Raises if the options of the groups need states that the units do not keep."""
    if isinstance(optimizer, JoinedOptimizer):
        raise StateError(
            f"a group cannot be added to {kind_of(optimizer)}: which of them trains it is unknown. Add it before "
            "`shard`."
        )
    book = RuleBook(optimizer, optimizer_format)
    for unit in units:
        held = unit.rule_if_trained
        if held is None:
            raise StateError(
                f"the unit {unit.name!r} was frozen at `shard`, with parameters that {kind_of(optimizer)} cannot "
                "update, so it has no states. Unfreeze what is to be trained before `shard`, and freeze it afterwards."
            )
        wanted = book.rule(0, unit.dtype, [slot.shape for slot in unit.layout.slots])
        if wanted is None or wanted.specs != held.specs:
            names = [", ".join(s.name for s in rule.specs) if rule else "none" for rule in (wanted, held)]
            raise StateError(
                f"the new group's options need other states ({names[0]}) than the optimizer kept at `shard` "
                f"({names[1]}). Give it the switches of the other groups (momentum, amsgrad, centered)."
            )
