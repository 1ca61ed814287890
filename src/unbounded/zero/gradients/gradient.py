"""The gradient of one unit between its backward and its update: which parameters have one, and what it is.

    EMPTY --add--> HELD --zero--> ZERO --add--> HELD
      ^-----------drop-----------+---------------+        SPENT: an early update took the bytes of a HELD one

EMPTY: no parameter has a gradient. HELD: the array has the owned part. ZERO: the parameters that had one have zeros,
which nobody has written yet (`zero_grad(set_to_none=False)`). The value is `factor` times the array: clipping and
unscaling only change the factor, and the update multiplies as it reads.

An update that runs in the background still reads the array when `step` has returned (`reading`). Whatever is done to
the gradient then is only noted (a drop, a factor, a slot that is cleared), and carried out by whoever next needs the
array, which waits for that update first. So `zero_grad`, `p.grad = None` and `model.zero_grad()` cost no wait.
"""

from __future__ import annotations

from enum import Enum

import torch

from unbounded.tiers.lane import Handle
from unbounded.zero.gradients.gradient_array import Factor, GradientArray
from unbounded.zero.layout import Layout, clip_range


class GradientState(Enum):
    EMPTY = "empty"
    ZERO = "zero"
    HELD = "held"
    SPENT = "spent"


class Gradient:
    """Holds and hands out the owned part of a unit's gradient. `Reduction` adds to it, the step reads it."""

    def __init__(self, layout: Layout, owned: tuple[int, int], store: GradientArray, device: torch.device) -> None:
        self.layout, self.owned, self.store = layout, owned, store
        self._device = device
        self.state = GradientState.EMPTY
        self.used = bytearray(len(layout.slots))  # which parameters have a gradient
        self.local: torch.Tensor | None = None  # this rank's own, whole, waiting for a reduction
        self.factor: Factor = 1.0
        self.adding: Handle | None = None  # the last addition in flight
        self.reading: Handle | None = None  # the update in flight that reads the array
        self.is_new = False  # a backward has added to it since the last step
        self.changes = 0  # so that what was computed from it is known to be old
        self._aside: dict[int, torch.Tensor] = {}  # slots that a user works on, in memory of their own
        self._cleared: set[int] = set()  # slots whose bytes are to be zeroed
        self._slot_factors: dict[int, Factor] = {}  # what single slots were scaled by
        self._squares: torch.Tensor | float | None = None
        self.counted: list[tuple[int, int]] | None = None  # the stretches whose squares count; None: all of it

    @property
    def tier(self) -> str:
        return self.store.tier

    @property
    def is_present(self) -> bool:
        """Whether any parameter has a gradient that an update would read."""
        return self.state in (GradientState.HELD, GradientState.ZERO) and any(self.used)

    @property
    def device_bytes(self) -> int:
        """What the device holds of it, or will after a backward."""
        return self.store.numel * self.store.dtype.itemsize if self.tier == "device" else 0

    @property
    def growth_bytes(self) -> int:
        """What the device will hold more of once another backward was added: the first is kept as it came."""
        if self.tier != "device" or self.state is not GradientState.HELD or self.store.is_wide:
            return 0
        return self.store.numel * (self.store.sum_dtype.itemsize - self.store.wire.itemsize)

    def order_stream(self) -> None:
        """Returns when the current stream may read what was added."""
        if self.adding is not None:
            self.adding.order_stream()

    def add(self, part: torch.Tensor, *, measure: bool) -> None:
        """Adds `part` (reduced, this rank's, on the device). Runs in the reduce lane."""
        self._touch()
        self._finish_reading()
        if self.state is GradientState.HELD:
            self.apply_changes()
            self.apply_factor()
            self.store.accumulate(part)
        else:
            self._forget_changes()
            self.store.store(part)
            if measure and not self.store.is_wide:
                self._squares = self._counted_squares()
        self.state, self.is_new = GradientState.HELD, True

    # -- all of it -------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets the gradient; memory on the device goes back at once."""
        if self.adding is not None:
            self.adding.settle()  # what is under way must not land afterwards
        self.state, self.adding, self.local, self.is_new = GradientState.EMPTY, None, None, False
        self.used = bytearray(len(self.used))
        self._forget_changes()
        self.store.free()

    def zero(self) -> None:
        """Lets those parameters that have a gradient have zeros."""
        used = self.used
        self.drop()
        if any(used):
            self.used, self.state = used, GradientState.ZERO

    def spend(self) -> None:
        """Frees the gradient's memory on the device after an update that is final, before `drop` is called."""
        self.state = GradientState.SPENT
        self.store.free()

    def scale(self, factor: Factor) -> None:
        self._touch()
        self.factor = _times(self.factor, factor)

    def squares(self) -> torch.Tensor | float:
        """The sum of squares of this rank's part: a float, or a scalar tensor where the device has it."""
        self.apply_changes()
        if self._squares is None:
            self._squares = self._counted_squares() if self.state is GradientState.HELD else 0.0
        return self._scaled(self._squares)

    # -- one parameter's -------------------------------------------------------------------------------------------

    def drop_slot(self, index: int) -> None:
        """One parameter has no gradient any more; the unit's goes with the last one."""
        if self.used[index]:
            self.zero_slot(index)
            self.used[index] = False
        if not any(self.used):
            self.drop()

    def zero_slot(self, index: int) -> None:
        self._touch()
        self._aside.pop(index, None)
        self._slot_factors.pop(index, None)
        self._cleared.add(index)
        if self.local is not None:
            slot = self.layout.slots[index]
            self.local[slot.start : slot.stop].zero_()

    def scale_slot(self, index: int, factor: Factor) -> None:
        self._touch()
        if self.local is not None:
            slot = self.layout.slots[index]
            self.local[slot.start : slot.stop].mul_(factor)
        if self.state is GradientState.HELD:
            self._slot_factors[index] = _times(self._slot_factors.get(index, 1.0), factor)

    def slot_squares(self) -> list[torch.Tensor | float]:
        """The sum of squares of what this rank holds of each parameter's."""
        self.apply_changes()
        held = self.state is GradientState.HELD
        ranges = [self._range(index) for index in range(len(self.used))]
        return [self._scaled(self.store.squares(*stretch)) if held else 0.0 for stretch in ranges]

    def open_slot(self, index: int) -> torch.Tensor:
        """A parameter's gradient to read and to change, where this rank holds all of it.

        Off the device it is memory of its own, which stays the user's when the gradient is dropped.
        """
        self._touch()
        if index not in self._aside:
            self.apply_changes()
            self.apply_factor()
            slot = self.layout.slots[index]
            if self.store.tier == "device":
                return self.store.array.direct[slot.start : slot.stop].view(slot.shape)  # type: ignore[union-attr,index]
            self._aside[index] = self.store.copy(slot.start, slot.stop).view(slot.shape)
        return self._aside[index]

    def leave_aside(self, index: int) -> None:
        """What `open_slot` gave of one parameter is the user's alone from now on."""
        self._aside.pop(index, None)

    def put_slot(self, index: int, value: torch.Tensor) -> None:
        """One parameter gets `value` as its gradient, where this rank holds all of it."""
        if self.state not in (GradientState.HELD, GradientState.ZERO):
            self.drop()
            self.state = GradientState.ZERO
        self.used[index] = True
        self.open_slot(index).copy_(value)

    # -- what was noted --------------------------------------------------------------------------------------------

    def apply_changes(self) -> None:
        """Carries out what was noted of single slots."""
        if not (self._cleared or self._aside or self._slot_factors):
            return
        cleared, aside, factors = self._cleared, self._aside, self._slot_factors
        self._cleared, self._aside, self._slot_factors = set(), {}, {}
        self._squares = None
        if factors and not cleared and not aside and (common := self._common(factors)) is not None:
            self.factor = _times(self.factor, common)
            return
        self._finish_reading()
        for index in cleared if self.state is GradientState.HELD else ():
            self.store.multiply(*self._range(index), 0.0)
        for index, factor in factors.items():
            self.store.multiply(*self._range(index), factor)
        if aside:
            self.apply_factor()
        for index, value in aside.items():
            self.store.write(self._range(index)[0], value.detach().reshape(-1))

    def write_out(self) -> None:
        """Lets the array be the gradient, with nothing noted: for whoever reads it as it lies."""
        if self.is_present:
            self.order_stream()
            self.apply_changes()
            self.apply_factor()

    def apply_factor(self) -> None:
        """Brings the array to what the gradient is: zeros written, the factor multiplied."""
        self._finish_reading()
        if self.state is GradientState.ZERO:
            where = self._device if self.store.tier == "device" else "cpu"
            self.store.store(torch.zeros(self.store.numel, dtype=self.store.wire, device=where))
            self.state, self.factor = GradientState.HELD, 1.0
        if not _is_one(self.factor):
            factor, self.factor = self.factor, 1.0
            self.store.multiply(0, self.store.numel, factor)
            self._squares = None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _counted_squares(self) -> torch.Tensor | float:
        """The squares of what this rank counts: other ranks count what several hold."""
        ranges = [(0, self.store.numel)] if self.counted is None else self.counted
        total: torch.Tensor | float = 0.0
        for start, stop in ranges:
            total = self.store.squares(start, stop) + total
        return total

    def _touch(self) -> None:
        self.changes += 1
        self._squares = None

    def _scaled(self, square: torch.Tensor | float) -> torch.Tensor | float:
        return square if _is_one(self.factor) else square * self.factor**2

    def _common(self, factors: dict[int, Factor]) -> Factor | None:
        """The one factor that every used slot got, if it is one."""
        found = [factors.get(index) for index, used in enumerate(self.used) if used]
        first = found[0] if found else None
        return first if all(f is first or (isinstance(f, float) and f == first) for f in found) else None

    def _range(self, index: int) -> tuple[int, int]:
        """What this rank owns of a slot, inside the owned part."""
        slot = self.layout.slots[index]
        part = clip_range(slot.start, slot.stop, *self.owned)
        return (part[0] - self.owned[0], part[1] - self.owned[0]) if part else (0, 0)

    def _forget_changes(self) -> None:
        self._touch()
        self.factor = 1.0
        self._cleared, self._aside, self._slot_factors = set(), {}, {}

    def _finish_reading(self) -> None:
        if self.reading is not None:
            self.reading.finish()
            self.reading = None


def _is_one(factor: Factor) -> bool:
    return isinstance(factor, float) and factor == 1.0


def _times(first: Factor, second: Factor) -> Factor:
    if _is_one(first):
        return second
    return first if _is_one(second) else first * second
