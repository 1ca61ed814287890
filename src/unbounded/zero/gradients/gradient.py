"""The gradient of one unit between its backward and its update: which parameters have one, and what becomes of it.

    EMPTY --add--> HELD --zero--> ZERO --add, or written out--> HELD
      ^-----------drop-----------+---------------+        SPENT: an update inside the backward took a HELD one

EMPTY: no parameter has a gradient. HELD: the array has the owned part. ZERO: the parameters that had one have zeros,
which nobody has written yet (`zero_grad(set_to_none=False)`). What it is worth is in `gradient_value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from unbounded.native.bulk import new_tensor
from unbounded.tiers.lane import Handle
from unbounded.zero.gradients import spent
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.gradients.gradient_value import GradientState, GradientValue
from unbounded.zero.gradients.lent import Lent
from unbounded.zero.gradients.scale_factor import ScaleFactor, scale_tensor
from unbounded.zero.gradients.use import Vote
from unbounded.zero.layout import Layout


class Gradient(GradientValue):
    """Holds and hands out the owned part of a unit's gradient. `Reduction` adds to it, the step reads it."""

    def __init__(self, layout: Layout, owned: tuple[int, int], store: GradientArray, device: torch.device) -> None:
        super().__init__(layout, owned, store, device)
        self.local: torch.Tensor | None = None  # this rank's own, whole, waiting for a reduction
        self.adding: Handle | None = None  # the last addition in flight
        self.is_new = False  # a backward has added to it since the last step
        self.is_kept = True  # until it is dropped; otherwise an update takes it before its backward ends

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

    @property
    def dtype(self) -> torch.dtype:
        """That of its values, on all ranks alike. If an addition may widen them, returns when it has."""
        if self.store.sum_dtype != self.store.wire:
            self._settle_adding()
        return self.store.dtype

    def order_stream(self) -> None:
        """Returns when the current stream may read what was added."""
        if self.adding is not None:
            self.adding.order_stream()

    def measure_early(self, part: torch.Tensor) -> torch.Tensor | float | None:
        """The squares of a `part` that will be added, on the stream that made it; None if `add` takes them better."""
        is_kept_as_it_is = self.state is not GradientState.HELD and not self._lent and part.dtype == self.store.wire
        return self.store.squares_of(part, self._counted_ranges()) if is_kept_as_it_is else None

    def add(self, part: torch.Tensor, *, measure: bool, squares: torch.Tensor | float | None = None) -> None:
        """Adds `part` (reduced, this rank's, on the device), whose `squares` may be known. Runs in the reduce lane."""
        self._touch()
        self._finish_reading()
        if self.state is GradientState.HELD or self._lent:
            self.apply_changes()
            self.apply_factor()
            self._lent.refuse_widening(self.layout.slots[0].name)
            total = self.store.accumulate(part)
            self._show_lent()
            if self.counted is None:
                self._squares = total
        else:
            self._forget_changes()
            if squares is not None:
                self.store.store(part)
                self._squares = float(squares)  # computed before the part was on its way
            elif measure and not self.is_measured_together:
                self._squares = self.store.store(part, self._counted_ranges())
            else:
                self.store.store(part)
        self.state, self.is_new = GradientState.HELD, True

    def hold_local(self, full: torch.Tensor) -> None:
        """Keeps this rank's own gradient until it is reduced."""
        self._touch()
        self.local, self.is_new = full, True

    def open_local(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's own, to be written to: zeros where there is none yet."""
        if self.local is None:
            self.local = new_tensor(self.layout.numel, dtype, self._device).zero_()
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
            self.store.clear(0, self.store.numel)
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

    def is_open(self, index: int, joined: bool = False) -> bool:
        """Whether `open_slot` can be called: this rank holds all of it, or it was lent.

        With `joined`, all of it is also what other ranks of the tensor axis have.
        """
        if self.local is not None or self.state is GradientState.SPENT or (joined and not self.is_joined(index)):
            return False
        return self.is_whole or index in self._lent

    def open_shape(self, index: int) -> tuple[int, ...]:
        """The shape of what `open_slot` gives."""
        return tuple(self._lent.get(index).shape) if index in self._lent else self.layout.slots[index].shape

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
        is_ours = self.is_whole and tuple(value.shape) == self.layout.slots[index].shape
        self._lent.put(index, value.to(self.store.dtype), stays=not is_ours)

    # -- who waits, and who is refused -------------------------------------------------------------------------------

    def settle_lent(self) -> None:
        """Returns when memory of it that a user holds may be written to."""
        if self.is_lent:
            if self.adding is not None:
                self.adding.finish()
            self._finish_reading()

    def write_out(self) -> None:
        """Makes the array the gradient, with nothing noted, for code that reads the array directly."""
        if self.is_present:
            self.order_stream()
            self.apply_changes()
            self.apply_factor()

    def _refuse_unstepped(self) -> None:
        """Raises where it was used up and no step has followed."""
        if self.state is GradientState.SPENT and self.is_new:
            spent.refuse_drop(self.layout.slots[0].name)

    def _settle_adding(self) -> None:
        """Waits for a running addition, which must not land after other changes."""
        if self.adding is not None:
            self.adding.settle()
