"""Which units get memory for a draft (`step.early.drafts`), and for what of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unbounded.planner.unit_bytes import UnitBytes
from unbounded.zero.step.early.in_backward import InBackward


def drafted_bytes(unit: UnitBytes, drafted: InBackward) -> int:
    """What a unit's draft takes."""
    if drafted is InBackward.NOTHING:
        return 0
    return unit.updated_weights + (unit.optimizer + unit.remainder if drafted is InBackward.ALL else 0)


def choose_drafts(sizes: Sequence[UnitBytes], able: Sequence[bool], most: int, spare: int) -> tuple[InBackward, ...]:
    """At most so many drafts, in so many bytes: of the last units first, because their gradients come first.

    As many as possible have all states, with memory left for the new weights of two thirds of the other units. A
    backward seldom has time for more of those (`step.early.pace`).
    """
    order = [index for index in reversed(range(len(sizes))) if able[index]]
    of_all, of_weights = (
        [0, *accumulate(drafted_bytes(sizes[index], drafted) for index in order)]
        for drafted in (InBackward.ALL, InBackward.WEIGHTS)
    )
    num_all = min(len(order), most)
    while num_all and of_all[num_all] + of_weights[_end(num_all, len(order), most)] - of_weights[num_all] > spare:
        num_all -= 1
    end = _end(num_all, len(order), most)
    while end > num_all and of_all[num_all] + of_weights[end] - of_weights[num_all] > spare:
        end -= 1
    chosen = dict.fromkeys(order[:end], InBackward.WEIGHTS) | dict.fromkeys(order[:num_all], InBackward.ALL)
    return tuple(chosen.get(index, InBackward.NOTHING) for index in range(len(sizes)))


def _end(num_all: int, num_able: int, most: int) -> int:
    """Where drafts end if so many have all states, and two thirds of the rest new weights."""
    return min(num_all + -(-2 * (num_able - num_all) // 3), most)
