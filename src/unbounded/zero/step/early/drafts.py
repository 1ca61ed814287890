"""Updates inside the backward that can be discarded: a unit's new weights and states are written to other arrays.

    backward   | u3 |    | u2 |    | u1 |
    gradient        | u3 |    | u2 |    | u1 |
    draft                | u3 |    | u2 |                u1 is cancelled: its update begins with the step
    step                                      | take u2, u3 | update u1 ... |

Where there is no memory for a second set of states, a draft has only the new weights. Then the next forward does not
wait for the unit; its states are updated in their place when the units that it does wait for are done.

Clipping needs a norm that is known only when the backward ends, so an update before that is a guess: that the step will
use the gradient as it landed, and a factor and hyper-parameters that are already known. A draft notes what it was made
from (`Basis`). The step works out what it would update from. If that is the same, old and new arrays are exchanged;
otherwise the unit is updated from its old states as usual. So results never depend on whether a guess was good:
`Outlook` only avoids bad ones.

What a draft reads may change under it: another backward adds to the gradient, somebody writes to a weight. Nobody waits
for a draft. The arrays count their changes, before and after each, so a draft that saw one has a different basis.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unbounded.native import kernels
from unbounded.native.host_memory import available_bytes
from unbounded.observe import trace
from unbounded.optim.rules import NativeRule
from unbounded.tiers.array import Array, array_bytes
from unbounded.tiers.lane import Lane
from unbounded.tiers.reader import Reader
from unbounded.zero.step.early.in_backward import InBackward
from unbounded.zero.step.early.pace import Pace
from unbounded.zero.step.update_pass import Job, plan_jobs
from unbounded.zero.unit import Unit

# Steps without drafts after some were of no use, twice as many each time, up to so many.
MOST_PAUSED = 64


AllocateLike = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Makes arrays like those given, on their tiers: all of them, or none."""


@dataclass(frozen=True)
class Basis:
    """Everything that determines an update: equal ones give the same bits."""

    jobs: tuple[Job, ...]
    factor: float
    gradient: int  # changes of the array so far
    states: int  # writes to the states from outside


def basis_of(unit: Unit, jobs: Sequence[Job], factor: float) -> Basis:
    """What would determine an update of `unit` now."""
    return Basis(tuple(jobs), factor, unit.gradient.store.num_changes, unit.num_writes)


class Draft:
    """The spare arrays of one unit whose states, weights and gradient are in host memory; allocated when first used."""

    def __init__(self, unit: Unit, rule: NativeRule, allocate: AllocateLike, *, has_states: bool) -> None:
        self.unit, self._rule, self._allocate, self.has_states = unit, rule, allocate, has_states
        self._arrays: dict[str, Array] = {}
        self._reader: Reader | None = None  # a save that still reads the arrays that are spare now
        self._asked: tuple[Job, ...] | None = None  # not begun yet
        self._is_writing = False
        self._basis: Basis | None = None  # of what is written

    def ask(self, groups: Sequence[dict[str, Any]]) -> tuple[Job, ...] | None:
        """What to write, from the present hyper-parameters; None if the update would leave something out."""
        self._basis = self._asked = None
        is_on_host = all(array.tier == "host" for array in self.unit.states.values())  # without a second set, they move
        if is_on_host and 0 not in self.unit.gradient.used and 0 not in self.unit.is_grouped:
            self._asked = tuple(plan_jobs(self.unit, groups))
        return self._asked

    def cancel(self) -> None:
        """Cancels the draft if it has not begun."""
        self._asked = None

    def write(self, jobs: tuple[Job, ...], factor: float, pool: kernels.Pool) -> bool:
        """Runs in the update lane, after the gradient has landed. Returns whether it was still wanted."""
        self._is_writing = True  # before the look at what is asked: see `holds_states`
        try:
            return self._asked is jobs and self._write(jobs, factor, pool)
        finally:
            self._is_writing = False

    def _write(self, jobs: tuple[Job, ...], factor: float, pool: kernels.Pool) -> bool:
        self._asked = None
        basis = basis_of(self.unit, jobs, factor)
        gradient = self.unit.gradient.store.array
        old = self.unit.arrays()
        if not self._arrays:
            if self.num_bytes > available_bytes() // 2:  # whatever the budget says, other programs need memory too
                return False
            self._arrays = self._allocate({name: old[name] for name in self._names()})
        if self._reader is not None:
            self._reader.make_way(pool)
            self._reader = None
        if gradient is None or gradient.direct is None:
            return False
        with trace.device_span("host optimizer", self.unit.name):
            for job in jobs:
                self._apply(job, factor, gradient.direct, old, pool)
        self._basis = basis
        return True

    def _apply(
        self, job: Job, factor: float, gradient: torch.Tensor, old: Mapping[str, Array], pool: kernels.Pool
    ) -> None:
        every = {"weight": 1, **{spec.name: spec.every for spec in self._rule.specs}}

        def stretch(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
            return {
                name: array.direct[job.start // every[name] : -(-job.stop // every[name])]  # type: ignore[index]
                for name, array in arrays.items()
            }

        states = stretch(self._arrays)
        weight = states.pop("weight")
        self._rule.apply(
            job.numbers,
            {},
            weight=weight,
            grad=gradient[job.start : job.stop],
            states=states if self.has_states else None,
            grad_scale=factor,
            pool=pool,
            source=stretch(old),
        )

    def take(self, basis: Basis) -> bool:
        """Exchanges old and new arrays if an update from `basis` gives the new ones. Runs in the update lane."""
        written, self._basis = self._basis, None
        if written != basis:
            return False
        before = self.unit.swap_arrays(self._arrays)
        self._arrays = {name: before[name] for name in self._names()}
        self._reader = self.unit.hand_over_reader(keeps_states=not self.has_states)
        return True

    @property
    def old_weights(self) -> Array:
        """What the weights were before they were taken: states without a draft are updated together with them."""
        return self._arrays["weight"]

    def free(self, free: Callable[[Array], None], pool: kernels.Pool) -> None:
        """Gives the spare arrays back. Runs in the update lane."""
        if self._reader is not None:
            self._reader.make_way(pool)
        for array in self._arrays.values():
            free(array)
        self._arrays, self._reader, self._basis = {}, None, None

    @property
    def kind(self) -> InBackward:
        return InBackward.ALL if self.has_states else InBackward.WEIGHTS

    @property
    def is_written(self) -> bool:
        return self._basis is not None

    @property
    def holds_states(self) -> bool:
        """Whether the unit's states must stay where they are: they have a second set, or a draft reads them."""
        # In this order: a draft that is being written was asked for before, and is marked before that is forgotten.
        return self.has_states or self._asked is not None or self._is_writing

    @property
    def num_bytes(self) -> int:
        arrays = self.unit.arrays()
        return sum(array_bytes(arrays[name]) for name in self._names())

    def _names(self) -> list[str]:
        return ["weight", *self.unit.states] if self.has_states else ["weight"]


class Outlook:
    """What the next step is expected to be like: like the last one, if that used a factor that has occurred before.

    The factor is 1 in every step that does not clip; in fp16 it is the same until the scale changes; with clipping it
    differs in every step.
    """

    def __init__(self) -> None:
        self.num_backwards = 0  # of the last step
        self.num_taken = self.num_refused = 0  # drafts so far
        self._factor: float | None = None
        self._before: float | None = None
        self._pause = self._backoff = 0

    @property
    def factor(self) -> float | None:
        """What gradients will be multiplied by; None if that cannot be guessed."""
        is_known = self._factor == 1.0 or (self._factor is not None and self._factor == self._before)
        return self._factor if is_known and not self._pause else None

    def note(self, factors: set[float], *, num_taken: int, num_refused: int) -> None:
        """A step has used these factors, and so many drafts were used and not used."""
        self._before, self._factor = self._factor, factors.pop() if len(factors) == 1 else None
        self.num_taken += num_taken
        self.num_refused += num_refused
        self._pause = max(0, self._pause - 1)
        if num_refused:
            self._pause = self._backoff = min(MOST_PAUSED, 2 * self._backoff + 1)
        elif num_taken:
            self._backoff = 0


class Drafts:
    """The drafts of a model's units, written in the update lane."""

    def __init__(self, drafts: Mapping[Unit, Draft], lane: Lane, pool: kernels.Pool, *, splits: bool) -> None:
        self.of, self.outlook = dict(drafts), Outlook()
        counts = Counter(draft.kind for draft in drafts.values())
        self.pace = Pace({**counts, InBackward.MOMENTS: int(splits)})
        self._lane, self._pool = lane, pool
        self._num_asked = 0  # of new weights alone, since the last step

    def ask(self, unit: Unit, groups: Sequence[dict[str, Any]]) -> None:
        """The gradient of `unit` is being brought to its tier, probably for the last time before the step."""
        draft, factor = self.of.get(unit), self.outlook.factor
        if draft is None or factor is None or not self.pace.allows(draft.kind, self._num_asked):
            return
        if (jobs := draft.ask(groups)) is None:
            return
        self._num_asked += not draft.has_states
        self._lane.submit(self._write, draft, jobs, factor, unit.gradient.adding)

    def _write(self, draft: Draft, jobs: tuple[Job, ...], factor: float, adding: Any) -> None:
        if adding is not None:
            adding.wait()
        begin = time.perf_counter()
        draft.write(jobs, factor, self._pool)
        self.pace.work(time.perf_counter() - begin)

    def begin_step(self, num_updates: int, late_seconds: float) -> None:
        """A step with so many updates in the lane begins, after others have waited so long for those of the last one.

        Runs in the update lane.
        """
        now, is_drafted = time.perf_counter(), self.outlook.factor is not None
        self.pace.begin_step(now, num_updates, late_seconds, is_drafted=is_drafted)

    def num_split(self) -> int:
        """How many units this step updates in two parts, once its drafts are taken. Runs in the update lane."""
        return self.pace.num_split(is_drafted=self.outlook.factor is not None)

    @property
    def num_bytes(self) -> int:
        """What the spare arrays take once all were used."""
        return sum(draft.num_bytes for draft in self.of.values())

    def hold(self, unit: Unit) -> bool:
        """Whether states of `unit` must stay where they are because of its draft."""
        return unit in self.of and self.of[unit].holds_states

    def cancel(self) -> None:
        """The step begins: units whose drafts have not begun are updated in its order."""
        self._num_asked = 0
        for draft in self.of.values():
            draft.cancel()

    def give_up(self, free: Callable[[Array], None]) -> int:
        """From now on there are no drafts, because their memory is needed; returns how many bytes they had."""
        num_bytes, drafts = self.num_bytes, [*self.of.values()]
        self.cancel()
        self.of.clear()
        self._lane.submit(self._free, drafts, free).wait()
        return num_bytes

    def _free(self, drafts: Sequence[Draft], free: Callable[[Array], None]) -> None:
        for draft in drafts:
            draft.free(free, self._pool)
