"""The gradient of one unit between its backward and its update: which parameters have one, and what it is.

    EMPTY --add--> HELD --zero--> ZERO --add--> HELD
      ^-----------drop-----------+---------------+        SPENT: an update inside the backward took a HELD one

EMPTY: no parameter has a gradient. HELD: the array has the owned part. ZERO: the parameters that had one have zeros,
which nobody has written yet (`zero_grad(set_to_none=False)`). The value is `factor` times the array: clipping and
unscaling only change the factor, and the update multiplies as it reads.

An update in the background may still read the array after `step` has returned (`reading`). Whatever is done to the
gradient then is only noted (a drop, a factor, changes of single slots: `noted`), and carried out by whoever next needs
the array, which first waits for that update. So `zero_grad`, `p.grad = None` and `model.zero_grad()` do not wait.

Memory of it that users hold is always up to date (`lent`): then nothing is merely noted. On the device it is memory of
the array itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import torch

from unbounded.tiers.lane import Handle
from unbounded.zero.gradients import spent
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.gradients.lent import Lent
from unbounded.zero.gradients.noted import Noted
from unbounded.zero.gradients.scale_factor import ScaleFactor, is_one, scale_tensor, times
from unbounded.zero.gradients.use import Use, Vote
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
        self._use = Use(len(layout.slots))
        self.local: torch.Tensor | None = None  # this rank's own, whole, waiting for a reduction
        self.factor: ScaleFactor = 1.0
        self.adding: Handle | None = None  # the last addition in flight
        self.reading: Handle | None = None  # the update in flight that reads the array
        self.is_new = False  # a backward has added to it since the last step
        self.changes = 0  # so that results computed from it are known to be outdated
        self._lent = Lent(store)
        self._noted = Noted()
        self._squares: torch.Tensor | float | None = None
        self.counted: list[tuple[int, int]] | None = None  # the stretches whose squares count; None: all of it
        self.is_kept = True  # until it is dropped; otherwise an update takes it before its backward ends

    @property
    def tier(self) -> str:
        return self.store.tier

    @property
    def used(self) -> bytearray:
        """Which parameters have a gradient, one flag each."""
        return self._use.flags

    @property
    def is_present(self) -> bool:
        """Whether any parameter has a gradient that an update would read."""
        return self.state in (GradientState.HELD, GradientState.ZERO) and any(self.used)

    @property
    def device_bytes(self) -> int:
        """What the device holds of it, or will after a backward."""
        return self.store.numel * self.store.dtype.itemsize if self.tier == "device" and self.is_kept else 0

    @property
    def growth_bytes(self) -> int:
        """How many more bytes the device will hold once another backward is added; the first is stored as it came."""
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
        if self.state is GradientState.HELD or self._lent:
            self.apply_changes()
            self.apply_factor()
            self._lent.refuse_widening(self.layout.slots[0].name)
            self.store.accumulate(part)
            self._show_lent()
        else:
            self._forget_changes()
            self.store.store(part)
            if measure and not self.store.is_wide:
                self._squares = self._counted_squares()
        self.state, self.is_new = GradientState.HELD, True

    def hold_local(self, full: torch.Tensor) -> None:
        """Keeps this rank's own gradient until it is reduced."""
        self._touch()
        self.local, self.is_new = full, True

    def open_local(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's own, to be written to: zeros where there is none yet."""
        if self.local is None:
            self.local = torch.zeros(self.layout.numel, dtype=dtype, device=self._device)
        return self.local

    def take_local(self) -> torch.Tensor | None:
        """This rank's own, for its reduction."""
        local, self.local = self.local, None
        return local

    def mark_used(self, flags: Iterable[int]) -> None:
        """Which parameters have a gradient, one flag each."""
        self._use.put(flags)

    def expect_vote(self, vote: Vote, start: int) -> None:
        """The ranks vote on which parameters have a gradient; the flags of this one are at `start`."""
        self._use.expect(vote, start)

    def restore(self, used: Sequence[bool], local: torch.Tensor | None) -> None:
        """What a checkpoint has of it besides the reduced part, which is added."""
        self._use.put(used)
        self.is_new = True
        if local is not None:
            self.local = local.to(self._device)

    def end_step(self) -> None:
        """A step has used it: what users hold of it may be written to."""
        self.expect_no_step()
        self.settle_lent()

    def expect_no_step(self) -> None:
        """No step will use what backwards have added so far."""
        self.is_new = False

    # -- all of it -------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets the gradient; memory on the device is freed at once."""
        self._refuse_unstepped()
        self._settle_adding()
        self.state, self.adding, self.local, self.is_new = GradientState.EMPTY, None, None, False
        self._use.clear()
        self._forget_changes()
        self.store.free()

    def zero(self) -> None:
        """Makes zeros the gradient of the parameters that have one."""
        if not self.is_kept:
            self.refuse_spent()
        used, lent, array = bytes(self.used), self._lent, self.store.array if self._lent.has_array() else None
        self._lent = Lent(self.store)
        self.drop()
        lent.drop_unheld()
        if any(used):
            self._use.put(used)
            self.state = GradientState.ZERO
        if array is not None:
            self._finish_reading()
            self.store.array, self.state = array, GradientState.HELD
            self.store.multiply(0, self.store.numel, 0.0)
        self._lent = lent
        for _, value in lent:
            value.zero_()

    def join_zeros(self) -> None:
        """No rank has more than zeros: if some parameter has them on any rank, it has them here too."""
        if self.state is GradientState.EMPTY and any(self.used):
            self.state = GradientState.ZERO

    def spend(self) -> None:
        """Frees the gradient's memory on the device after an update that is final, before `drop` is called.

        An update in the background keeps it until it has read it. One on this stream may not have run yet.
        """
        self.state = GradientState.SPENT
        if self.reading is None:
            self.store.outlast_stream()
        self.store.free()

    def scale(self, factor: ScaleFactor) -> None:
        self._touch()
        if self.is_lent:
            self.apply_changes()
        self.factor = times(self.factor, factor)
        if self.is_lent:
            self.apply_factor()

    def squares(self) -> torch.Tensor | float:
        """The sum of squares of this rank's part: a float, or a scalar tensor if the device has it."""
        self.refuse_spent()
        self.apply_changes()
        if self._squares is None or self.is_lent:
            self._squares = self._counted_squares() if self.state is GradientState.HELD else 0.0
        return self._scaled(self._squares)

    # -- one parameter's -------------------------------------------------------------------------------------------

    def drop_slot(self, index: int) -> None:
        """One parameter has no gradient any more; with the last one, the unit has none."""
        self._refuse_unstepped()
        self._settle_adding()
        if self.state is GradientState.SPENT:
            self.used[index] = False
        elif self.used[index]:
            self._lent.leave(index)
            self.zero_slot(index)
            self.used[index] = False
        if not any(self.used):
            self.drop()

    def zero_slot(self, index: int) -> None:
        self.refuse_spent()
        self._settle_adding()
        self._touch()
        if index in self._lent:
            self._lent.get(index).zero_()
        else:
            self._noted.clear(index)
        if self.local is not None:
            slot = self.layout.slots[index]
            self.local[slot.start : slot.stop].zero_()
        if self.is_lent:
            self._apply_notes()

    def scale_slot(self, index: int, factor: ScaleFactor) -> None:
        self.refuse_spent()
        self._touch()
        if self.local is not None:
            slot = self.layout.slots[index]
            self.local[slot.start : slot.stop].mul_(factor)
        if index in self._lent:
            scale_tensor(self._lent.get(index), factor)
        elif self.state is GradientState.HELD:
            self._noted.scale(index, factor)
        if self.is_lent:
            self._apply_notes()

    def slot_squares(self) -> list[torch.Tensor | float]:
        """The sum of squares of this rank's part of each parameter's gradient."""
        self.refuse_spent()
        self.apply_changes()
        held = self.state is GradientState.HELD
        ranges = [self._range(index) for index in range(len(self.used))]
        return [self._scaled(self.store.squares(*stretch)) if held else 0.0 for stretch in ranges]

    def is_open(self, index: int) -> bool:
        """Whether `open_slot` can be called: this rank holds all of it, or it was lent."""
        return self.local is None and self.state is not GradientState.SPENT and (self.is_whole or index in self._lent)

    def open_slot(self, index: int) -> torch.Tensor:
        """A parameter's gradient to read and to change, if that is possible.

        Off the device it is separate memory, which stays with the user when the gradient is dropped.
        """
        self._touch()
        if index not in self._lent:
            self._apply_notes()
            self.apply_factor()
            slot = self.layout.slots[index]
            if self.store.tier == "device":
                return self._lent.lend_array()[slot.start : slot.stop].view(slot.shape)
            self._lent.put(index, self.store.copy(slot.start, slot.stop).view(slot.shape))
        return self._lent.get(index)

    def take_slot(self, index: int) -> torch.Tensor:
        """The same for a gradient that is dropped: memory that from now on belongs only to the user."""
        value = self.open_slot(index)
        value = value if index in self._lent else value.clone()
        self._lent.pop(index)
        return value

    def put_slot(self, index: int, value: torch.Tensor) -> None:
        """One parameter gets `value` as its gradient, and as its memory from now on, if this rank holds all of it.

        In another dtype it is a copy.
        """
        self.refuse_spent()
        if not self.is_kept:
            spent.refuse_new(self.layout.slots[index].name)
        if self.state not in (GradientState.HELD, GradientState.ZERO):
            self.drop()
            self.state = GradientState.ZERO
        self._touch()
        self._lent.leave(index)
        self._apply_notes()
        self.apply_factor()
        self.used[index] = True
        self._lent.put(index, value.to(self.store.dtype))

    # -- what was noted --------------------------------------------------------------------------------------------

    def apply_changes(self) -> None:
        """Carries out what was noted for single slots."""
        if not (self._noted or self._lent):
            return
        if not self._lent and (common := self._noted.common(self.used)) is not None:
            self.factor, self._noted, self._squares = times(self.factor, common), Noted(), None
            return
        self._apply_notes()
        if self._lent:
            self._squares = None
            self.apply_factor()
        for index, value in self._lent:
            self._write_back(index, value)
        self._lent.drop_unheld()

    def lend_whole(self, flat: torch.Tensor) -> None:
        """Lends every parameter's gradient out of `flat`, of which this rank keeps a part, until `end_lending`."""
        for index, slot in enumerate(self.layout.slots):
            if self.used[index] and index not in self._lent:
                self._lent.put(index, flat[slot.start : slot.stop].view(slot.shape))

    def end_lending(self) -> None:
        """Takes over what was written to it; from now on, what users still hold of a part that others own is a copy."""
        self.apply_changes()
        if not self.is_whole:
            self._lent.clear()

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps all of it."""
        return self.owned == (0, self.layout.numel)

    def settle_lent(self) -> None:
        """Returns when memory of it that a user holds may be written to."""
        if self.is_lent:
            if self.adding is not None:
                self.adding.finish()
            self._finish_reading()

    def _apply_notes(self) -> None:
        """Clears and scales single slots. Those that a user works on have no notes."""
        cleared, factors = self._noted.take()
        if cleared or factors:
            self._squares = None
            self._finish_reading()
        for index in cleared if self.state is GradientState.HELD else ():
            self.store.multiply(*self._range(index), 0.0)
        for index, factor in factors.items():
            self.store.multiply(*self._range(index), factor)

    def write_out(self) -> None:
        """Makes the array the gradient, with nothing noted, for code that reads the array directly."""
        if self.is_present:
            self.order_stream()
            self.apply_changes()
            self.apply_factor()

    def apply_factor(self) -> None:
        """Makes the array equal to the gradient: writes zeros, multiplies by the factor."""
        self._finish_reading()
        if self.state is GradientState.ZERO:
            where = self._device if self.store.tier == "device" else "cpu"
            self.store.store(torch.zeros(self.store.numel, dtype=self.store.wire, device=where))
            self.state, self.factor = GradientState.HELD, 1.0
        if not is_one(self.factor):
            factor, self.factor = self.factor, 1.0
            self.store.multiply(0, self.store.numel, factor)
            self._squares = None
            for _, value in self._lent:
                scale_tensor(value, factor)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def is_lent(self) -> bool:
        """Whether users may hold memory of it: then changes of the gradient must show there at once."""
        return bool(self._lent) or self._lent.has_array()

    def _write_back(self, index: int, value: torch.Tensor) -> None:
        start, stop = self._range(index)
        first = self.layout.slots[index].start - self.owned[0]
        part = value.reshape(-1)[start - first : stop - first] if start < stop else value.new_empty(0)
        self._lent.write_back(start, part)

    def _show_lent(self) -> None:
        """Copies the array's values to memory that users hold, if it has all of them."""
        if not self.is_whole:
            self._lent.clear()
        for index, value in self._lent:
            value.copy_(self.store.copy(*self._range(index)).view(value.shape))

    def refuse_spent(self) -> None:
        """Raises where an update inside the backward has used the gradient up."""
        if self.state is GradientState.SPENT:
            spent.refuse_use(self.layout.slots[0].name)

    def _refuse_unstepped(self) -> None:
        """Raises where it was used up and no step has followed."""
        if self.state is GradientState.SPENT and self.is_new:
            spent.refuse_drop(self.layout.slots[0].name)

    def _counted_squares(self) -> torch.Tensor | float:
        """The squares of what this rank counts; if several ranks hold something, one counts it."""
        ranges = [(0, self.store.numel)] if self.counted is None else self.counted
        total: torch.Tensor | float = 0.0
        for start, stop in ranges:
            total = self.store.squares(start, stop) + total
        return total

    def _touch(self) -> None:
        self.changes += 1
        self._squares = None

    def _scaled(self, square: torch.Tensor | float) -> torch.Tensor | float:
        return square if is_one(self.factor) else square * self.factor**2

    def _range(self, index: int) -> tuple[int, int]:
        """This rank's part of a slot, as a range inside the owned part."""
        slot = self.layout.slots[index]
        part = clip_range(slot.start, slot.stop, *self.owned)
        return (part[0] - self.owned[0], part[1] - self.owned[0]) if part else (0, 0)

    def _forget_changes(self) -> None:
        self._touch()
        self.factor, self._noted = 1.0, Noted()
        self._lent.clear()

    def _settle_adding(self) -> None:
        """Waits for a running addition, which must not land after other changes."""
        if self.adding is not None:
            self.adding.settle()

    def _finish_reading(self) -> None:
        if self.reading is not None:
            self.reading.finish()
            self.reading = None
