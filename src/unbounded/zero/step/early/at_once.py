"""Updates inside the backward that are final: a unit is updated once its gradient is final, which is then gone.

    backward   | u3 |    | u2 |    | u1 |    | u0 |
    reduce          | u3 |    | u2 |    | u1 |    | u0 |
    update                    | u3 |    | u2 |    | u1 | u0 |       a few units later on several ranks
    step                                                     |      counts, and compares what they were updated with

This is for loops that say so: `gradients="none"` in the plan, or `last_backward()` around one backward. Nothing is
guessed and nothing can be taken back, so whatever would change the step is refused (`PendingStep`).

Note: who waits for whom. Ranks do not come to the same place in a backward at the same time, and one may skip what the
others run. So inside the backward no rank waits here for a reduction, which others may join only at their end: the
update of a unit begins when the next unit's gradient is final and its own has arrived, or at the end. The backward
waits only for updates of its own rank, as soon as `IN_FLIGHT` of them hold a gradient. And gathered weights
stay so until it ends: to gather them again would be a collective whose place depends on who was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from unbounded.errors import StateError
from unbounded.ranks.phases import describe_groups
from unbounded.tiers.lane import Handle
from unbounded.zero.engine import Engine
from unbounded.zero.gradients import spent
from unbounded.zero.gradients.gradient_value import GradientState
from unbounded.zero.unit import Unit

# Updates under way before the backward waits for the first: their gradients are all that is held.
IN_FLIGHT = 2

# Updates units with the options of these groups, and says which gathered weights are old (`Updates.run`).
RunUpdates = Callable[[Sequence[Unit], Sequence[dict[str, Any]], Callable[[Unit], None]], None]


class AtOnce:
    """Begins the updates of one model's units inside a backward. `kind` names the optimizer."""

    def __init__(self, engine: Engine, run_updates: RunUpdates, kind: str) -> None:
        self._engine, self.pending = engine, engine.pending
        self._run_updates, self._kind = run_updates, kind
        self._reduced: deque[Unit] = deque()  # their gradients are on their way
        self._running: deque[Handle] = deque()
        self._outdated: list[Unit] = []  # what is gathered of them is older than their weights
        self._options = ""  # that units were updated with

    def add(self, unit: Unit, groups: Sequence[dict[str, Any]]) -> None:
        """The gradient of `unit` is final and on its way."""
        if not self.pending.units:
            self._options = describe_groups(self._kind, groups)
        self.pending.note(unit)
        self._reduced.append(unit)
        self._begin(groups, is_over=False)

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """The backward is over: begins what is left."""
        try:
            self._begin(groups, is_over=True)
            for unit in self._outdated:
                self._engine.gathering.invalidate(unit)
            self._outdated.clear()
        except BaseException:
            self.pending.break_off()
            raise

    def finish(self, groups: Sequence[dict[str, Any]]) -> None:
        """Called by the step: raises where it would differ from what the backward has done."""
        for unit in self._engine.units:
            if unit.trainable and unit.gradient.state is GradientState.SPENT and not unit.gradient.is_new:
                spent.refuse_again(unit.name)
        now = describe_groups(self._kind, groups)
        if self.pending.units and now != self._options:
            pairs = zip(now.split("; "), self._options.split("; "), strict=False)
            changed = ", ".join(f"{one} instead of {other}" for one, other in pairs if one != other)
            raise StateError(
                f"options of the optimizer were changed between the backward, which has updated "
                f"{len(self.pending.units)} units already, and its step: {changed}. Change them after optimizer.step() "
                f"or before the backward, or keep gradients: {spent.KEEPING}."
            )
        self.clear()

    def clear(self) -> None:
        """From now on, no updated unit waits for a step."""
        self._reduced.clear()
        self._running.clear()
        self._outdated.clear()
        self.pending.clear()

    def _begin(self, groups: Sequence[dict[str, Any]], *, is_over: bool) -> None:
        """In the order of the reductions, which is the same on all ranks."""
        while self._reduced:
            unit = self._reduced[0]
            gradient = unit.gradient
            if not is_over and gradient.adding is not None and not gradient.adding.done():
                return
            self._reduced.popleft()
            gradient.order_stream()
            if any(gradient.used):
                self._update(unit, groups)
            else:
                gradient.drop()  # zeros, for the sake of the reduction

    def _update(self, unit: Unit, groups: Sequence[dict[str, Any]]) -> None:
        while len(self._running) >= IN_FLIGHT:
            self._running.popleft().finish()
        self._run_updates([unit], groups, self._outdate)
        unit.gradient.spend()
        is_alone = unit.is_whole or not unit.needs_wholes  # otherwise peers take part, and may wait for this rank
        if unit.states_written is not None and is_alone:
            self._running.append(unit.states_written)

    def _outdate(self, unit: Unit) -> None:
        self._engine.gathering.order_stream(unit)
        self._outdated.append(unit)
