"""The parts of a model that the fullest rank of a pipeline has, in kinds of equal ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from unbounded.planner.models.footprint import UnitFootprint, expand
from unbounded.planner.plan import Plan
from unbounded.planner.unit_bytes import fixed_tiers, read_placement


@dataclass(frozen=True)
class PartsAlike:
    """Parts with the same numbers for which a plan fixes the same, by their positions among the parts of the rank."""

    part: UnitFootprint
    fixed: tuple[tuple[str, str], ...]  # tiers by kind of state
    policy: str | None  # of a block; None: open
    positions: tuple[int, ...]


@dataclass(frozen=True)
class RankParts:
    """All parts of a rank in the order of the forward, and the kinds they are of."""

    parts: tuple[UnitFootprint, ...]
    kinds: tuple[PartsAlike, ...]


@lru_cache(maxsize=64)
def find_rank_parts(parts: tuple[UnitFootprint, ...], plan: Plan, pipeline: int) -> RankParts:
    """Its share of the blocks, and everything outside blocks."""
    kept = _first_blocks(expand(parts), pipeline)
    unsaid = "keep" if isinstance(plan.activations, tuple) else None  # of a block that none of the pairs matches
    alike: dict[tuple[UnitFootprint, tuple[tuple[str, str], ...], str | None], list[int]] = {}
    for position, part in enumerate(kept):
        policy = (read_placement(plan.activations, part.module_name) or unsaid) if part.is_block else None
        fixed = tuple(fixed_tiers(part.name, plan).items())
        nameless = replace(part, name="", module="")
        alike.setdefault((nameless, fixed, None if policy == "auto" else policy), []).append(position)
    kinds = [PartsAlike(kept[found[0]], *key[1:], tuple(found)) for key, found in alike.items()]
    return RankParts(tuple(kept), tuple(kinds))


def _first_blocks(parts: Sequence[UnitFootprint], pipeline: int) -> list[UnitFootprint]:
    blocks = [part.module_name for part in parts if part.is_block]
    others = set(blocks[math.ceil(len(blocks) / pipeline) :])
    return [part for part in parts if part.module_name not in others]
