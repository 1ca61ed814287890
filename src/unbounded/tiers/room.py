"""Host memory that is given out while training runs, within what is left of the budget.

States and buffers are placed before training; activations come with the batch, whose size nobody knows before. A room
says how much they may still take, and counts it. What is planned for states is kept free, whether they have been
allocated yet or not.
"""

from __future__ import annotations

import os
from typing import Protocol

from unbounded.errors import BudgetError
from unbounded.native.host_memory import available_bytes
from unbounded.planner.sizes import format_bytes
from unbounded.tiers.arena import HostArena
from unbounded.tiers.budget import FREE_PART
from unbounded.tiers.tiers import Tiers


class Room(Protocol):
    """Where host memory for activations comes from. What only makes steps shorter gives way to what is `wanted`."""

    arena: HostArena

    def spare_bytes(self, wanted: int = 0) -> int: ...

    def count(self, num_bytes: int) -> None: ...

    def shortage(self, num_bytes: int) -> BudgetError: ...


class TierRoom:
    """The host tier of a sharded model."""

    def __init__(self, tiers: Tiers) -> None:
        self.arena, self._tiers = tiers.arena, tiers

    def spare_bytes(self, wanted: int = 0) -> int:
        return self._tiers.make_spare(wanted)

    def count(self, num_bytes: int) -> None:
        """Counts bytes as activations; the arena has already counted them for the host."""
        self._tiers.activation_bytes += num_bytes

    def shortage(self, num_bytes: int) -> BudgetError:
        taken, budget = self._tiers.activation_bytes, self._tiers.budgets["host"] or 0
        held = self._tiers.held_host_bytes()
        return BudgetError(
            f"activations need {format_bytes(num_bytes)} more host memory, but of {format_bytes(budget)} they already "
            f"have {format_bytes(taken)}, and states and buffers have {format_bytes(held)}. Raise host_bytes by "
            f"{format_bytes(num_bytes - self.spare_bytes())} for each block that is left, run fewer tokens at once, "
            'or give some blocks the policy "recompute".'
        )


class FreeRoom:
    """What the machine has free, for a model that is not sharded."""

    def __init__(self) -> None:
        self.arena = HostArena(pin=True, num_threads=max(1, (os.cpu_count() or 1) // 2))  # if the caller asks for it
        self.used_bytes = 0

    def spare_bytes(self, wanted: int = 0) -> int:
        return int(available_bytes() * FREE_PART)

    def count(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes

    def shortage(self, num_bytes: int) -> BudgetError:
        return BudgetError(
            f"activations need {format_bytes(num_bytes)} more host memory, but only {format_bytes(available_bytes())} "
            f"are free, and they already have {format_bytes(self.used_bytes)}. Run fewer tokens at once, or give "
            'some blocks the policy "recompute".'
        )
