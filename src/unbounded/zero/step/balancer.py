"""Shares the device between states and activations while a model trains: reads clock and memory, and moves states.

`planner.balance` decides, and `relocation` moves states. Moves happen when a forward begins and no gradient is held. A
rank decides alone if it has its own states (a partitioned model, or one rank), because the order of collectives does
not depend on where states are. Plans that say where optimizer states live are left as they are.

What was left free is known only for batches as large as those that were seen. A forward with larger inputs sends the
states back that had moved to the device, so it finds the memory that it would have found without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import BudgetError
from unbounded.own_hook import OwnHook
from unbounded.planner.balance import Balance
from unbounded.planner.plan import Plan
from unbounded.zero.step.optimizer import ShardedOptimizer
from unbounded.zero.step.relocation import Relocation, device_bytes


class Balancer:
    """For one model. `free_bytes` is what was unused of the device since `forget` was called, `kept_bytes` what blocks
    kept in the last forward.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        relocation: Relocation,
        *,
        free_bytes: Callable[[], int],
        kept_bytes: Callable[[], int],
        forget: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.balance = Balance()
        self._optimizer, self._relocation, self._clock = optimizer, relocation, clock
        self._free_bytes, self._kept_bytes, self._forget = free_bytes, kept_bytes, forget
        self._last: float | None = None  # when the last step ended
        self._seconds: float | None = None  # of the step that ended since the last forward
        self._moved: list[str] = []  # units, by the last move
        self._placed: dict[str, None] = {}  # units that are on the device because they moved there
        # The shapes of inputs while the peak was read that the last move relied on, and of those since that move.
        self._seen, self._recent = _Shapes(), _Shapes()
        self._is_exceeded = False  # a forward had larger inputs, or did not fit

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Follows steps and forwards; the returned function ends it."""
        hooks = [
            self._optimizer.register_step_post_hook(lambda *_: self._note_step()),
            model.register_forward_pre_hook(OwnHook(self._begin), prepend=True, with_kwargs=True),
        ]

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def make_room(self, num_bytes: int) -> None:
        """Moves so many bytes of states to the host, as far as it has room, because a batch needs the memory."""
        self.balance.stop()
        with suppress(BudgetError):
            for unit in reversed(self._relocation.units_on("device")):
                if num_bytes <= 0:
                    break
                num_bytes -= device_bytes(unit)
                self._relocation.move(unit, "host")
                self._note_place(unit.name, "host")

    def note_shortage(self) -> None:
        """A batch did not fit: before the next forward, states that had moved to the device go back."""
        self._is_exceeded = True

    def _note_step(self) -> None:
        now = self._clock()
        self._seconds = None if self._last is None else now - self._last
        self._last = now

    @torch.compiler.disable
    def _begin(self, model: nn.Module, *inputs: Any) -> None:
        if self.balance.is_done and not self._placed:
            return
        self._compare(tuple(leaf.shape for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)))
        seconds, self._seconds = self._seconds, None
        if seconds is None or self.balance.is_done or not model.training or not torch.is_grad_enabled():
            return
        waiting = self._relocation.units_on("host")
        count = self.balance.after_step(
            seconds,
            free_bytes=self._free_bytes(),
            kept_bytes=self._kept_bytes(),
            waiting=[device_bytes(unit) for unit in waiting],
        )
        if count > 0:
            self._moved = [unit.name for unit in waiting[:count]]
            self._seen, self._recent = self._recent, _Shapes()
            self._move(self._moved, "device")
        elif count < 0:
            self._move(self._moved, "host")

    def _compare(self, shapes: tuple[torch.Size, ...]) -> None:
        """A forward has inputs of these shapes: notes them, or makes room for them if they are larger than before."""
        records = torch.is_grad_enabled()
        self._recent.note(shapes, records=records)
        self._is_exceeded |= bool(self._placed) and not self._seen.cover(shapes, records=records)
        if self._is_exceeded and self._placed:  # also in later forwards: those with a gradient stay until it is used
            self.balance.stop()
            self._move([*self._placed], "host")

    def _move(self, names: list[str], tier: str) -> None:
        source = "host" if tier == "device" else "device"
        try:
            for unit in self._relocation.units_on(source):
                if unit.name in names:
                    self._relocation.move(unit, tier)
                    self._note_place(unit.name, tier)
        except (BudgetError, torch.OutOfMemoryError):  # less room than was read; what has moved stays
            self.balance.stop()
        self._forget()

    def _note_place(self, name: str, tier: str) -> None:
        if tier == "device":
            self._placed[name] = None
        else:
            self._placed.pop(name, None)
        self._optimizer.plan = _with_place(self._optimizer.plan, name, tier)


class _Shapes:
    """The shapes of the inputs of forwards, apart for those that record a graph, which take more memory."""

    def __init__(self) -> None:
        self._of: dict[bool, set[tuple[torch.Size, ...]]] = {False: set(), True: set()}

    def note(self, shapes: tuple[torch.Size, ...], *, records: bool) -> None:
        self._of[records].add(shapes)

    def cover(self, shapes: tuple[torch.Size, ...], *, records: bool) -> bool:
        """Whether a forward was seen that took at least as much: no tensor is larger in any dimension."""
        known = self._of[True] if records else self._of[True] | self._of[False]
        return any(_is_within(shapes, seen) for seen in known)


def _is_within(shapes: tuple[torch.Size, ...], seen: tuple[torch.Size, ...]) -> bool:
    return [len(one) for one in seen] == [len(one) for one in shapes] and all(
        most >= size for one, other in zip(seen, shapes, strict=True) for most, size in zip(one, other, strict=True)
    )


def _with_place(plan: Plan, name: str, tier: str) -> Plan:
    """The closed plan with another place for one unit's gradient and states."""
    places = {
        kind: tuple((unit, tier if unit == name else where) for unit, where in getattr(plan, kind))
        for kind in ("gradients", "optimizer")
    }
    return replace(plan, **places)  # type: ignore[arg-type]
