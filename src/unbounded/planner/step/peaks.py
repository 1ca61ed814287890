"""What a step holds of each tier when it holds the most.

On a device there are two such moments. At the *turn*, when the forward ends, everything that blocks keep is there, and
the loss, or the last block's backward with its gradient. At the *end* of the backward all of that is gone, and all
gradients are there. In between, each block replaces what it kept by a gradient, so the peak is one of the two.
Gradients of earlier backwards are there at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from unbounded.planner.models.footprint import Footprint, StateBytes, UnitFootprint
from unbounded.planner.plan import TIERS
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.logits import loss_bytes
from unbounded.planner.unit_bytes import KINDS, UnitBytes, UnitPlace, use_of


def place_bytes(unit: UnitBytes, where: UnitPlace) -> tuple[float, ...]:
    """The most that a unit's states take of the tiers, including gradients."""
    use = use_of(unit, {kind: getattr(where, kind) for kind in KINDS})
    return tuple(float(use[tier]) for tier in TIERS)


def moment_bytes(unit: UnitBytes, where: UnitPlace, setup: Setup) -> tuple[float, ...]:
    """What a unit's states take at the turn and at the end, of the host, and of the disk."""
    device, host, disk = place_bytes(unit, where)
    if where.gradients != "device":
        if where.gradients == "host" and setup.accumulate > 1:
            host += unit.summed_gradients - unit.gradients
        return device, device, host, disk
    if setup.accumulate > 1:
        device += unit.summed_gradients - unit.gradients
        return device, device, host, disk
    return device - unit.gradients, device, host, disk


def activation_moments(held: dict[str, float]) -> tuple[float, ...]:
    """What a block's activations take at the moments."""
    return held["device"], 0.0, held["host"], held["disk"]


def working_bytes(
    footprint: Footprint, setup: Setup, *, gathered: Sequence[UnitFootprint], recomputes: bool
) -> tuple[float, float]:
    """Device memory at the turn and at the end besides states and what blocks keep: units of those that are `gathered`,
    gradients being moved, the loss, or one block that is recomputed for its backward."""
    states = footprint.states
    trained = max((part.trained for part in footprint.parts), default=0) / setup.tensor * states.gradients
    if setup.tile_bytes:
        trained = min(trained, setup.tile_bytes)
    ring = gathered_bytes(gathered, footprint.states, setup)
    blocks = [part for part in footprint.parts if part.is_block]
    back = max((_back_bytes(part, setup) for part in blocks), default=0.0)
    back += max((kept_bytes(part, setup) for part in blocks), default=0.0) if recomputes else 0.0
    made = min(trained, max((part.trained for part in blocks), default=0) / setup.tensor * states.gradients)
    return ring + max(back + made, loss_bytes(footprint, setup)), ring + back + 2 * trained


def gathered_bytes(parts: Sequence[UnitFootprint], states: StateBytes, setup: Setup) -> float:
    """The most weights of `parts` that are gathered at a time: the module in use, those fetched ahead of it, the one
    before it, and all that are around others, which stay for the whole pass."""

    def size(part: UnitFootprint) -> float:
        whole = part.numel / setup.tensor * states.weights
        return min(whole, setup.tile_bytes) if setup.tile_bytes else whole

    width, inner = setup.prefetch_units + 2, list[float]()
    for _, units in groupby((part for part in parts if not part.is_outer), lambda part: part.module_name):
        first, *others = units
        inner += [size(first) + sum(map(size, others))] * min(first.count, width)  # more make no larger window
    outer = sum(part.count * size(part) for part in parts if part.is_outer)
    return outer + max(sum(inner[start : start + width]) for start in range(len(inner) or 1))


def _back_bytes(part: UnitFootprint, setup: Setup) -> float:
    """What the backward of one block makes besides what the block kept."""
    return setup.tokens * part.cost.back / setup.tensor


def kept_bytes(part: UnitFootprint, setup: Setup) -> float:
    """What one block keeps of one micro-batch."""
    return setup.tokens * part.cost.kept_bytes(setup.sequence) / setup.tensor
