"""The step that a backward has begun: units that are updated already, until `optimizer.step()` says that they are.

    IDLE --a unit's gradient is final--> BEGUN --step--> IDLE
                                           |
                                           +--the backward breaks off--> BROKEN --load--> IDLE

Plain PyTorch changes no weight before the step. So while a step is BEGUN, whatever would see weights or
change the step is refused. When it is BROKEN, only some units have been updated, and only a checkpoint helps.
"""

from __future__ import annotations

from unbounded.errors import StateError
from unbounded.zero.gradients.spent import KEEPING
from unbounded.zero.unit import Unit


class PendingStep:
    """The pending step of one model."""

    def __init__(self) -> None:
        self.units: dict[Unit, None] = {}  # updated, or about to be, in the order of the backward
        self.is_broken = False

    def note(self, unit: Unit) -> None:
        """The gradient of `unit` is final, and its update takes it."""
        self.units[unit] = None

    def break_off(self) -> None:
        """The backward ended in an exception."""
        self.is_broken = bool(self.units)

    def clear(self) -> None:
        """The step was called, or all states were replaced."""
        self.units.clear()
        self.is_broken = False

    def refuse_broken(self) -> None:
        """Raises where a backward broke off after it had updated units."""
        if self.is_broken:
            names = ", ".join(unit.name for unit in self.units)
            raise StateError(
                f"a backward broke off after it had begun to update {len(self.units)} units ({names}), so the model is "
                "between two steps. Load a checkpoint: unbounded.load(folder, model, optimizer). A backward that "
                f"breaks off changes no weight where gradients are kept: {KEEPING}."
            )

    def refuse(self, what: str) -> None:
        """Raises where units are updated already and `optimizer.step()` was not called."""
        if not self.units:
            return
        self.refuse_broken()
        raise StateError(
            f"{what} comes between a backward that has updated {len(self.units)} units already and its "
            "optimizer.step(). Call optimizer.step() first. To add up several backwards, or to see or save weights "
            f"before the step, keep gradients: {KEEPING}."
        )
