"""What a unit's gradient is worth: `factor` times the array, with what was noted and what users hold of it.

Clipping and unscaling only change the factor, and the update multiplies as it reads. An update in the background may
still read the array after `step` has returned (`reading`). Whatever is done to the gradient then is only noted (a
factor, changes of single slots: `noted`), and carried out by whoever next needs the array, which first waits for that
update. So `zero_grad`, `p.grad = None` and `model.zero_grad()` do not wait.

Memory of it that users hold is always up to date (`lent`): then nothing is merely noted. On the device it is memory of
the array itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch

from unbounded.native.bulk import new_tensor
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import join_cut
from unbounded.tiers.lane import Handle
from unbounded.zero.gradients import spent
from unbounded.zero.gradients.gradient_array import GradientArray, device_squares
from unbounded.zero.gradients.lent import Lent
from unbounded.zero.gradients.noted import Noted
from unbounded.zero.gradients.scale_factor import ScaleFactor, is_one, scale_tensor, times
from unbounded.zero.gradients.use import Use
from unbounded.zero.layout import Layout, clip_range


class GradientState(Enum):
    EMPTY = "empty"
    ZERO = "zero"
    HELD = "held"
    SPENT = "spent"


class GradientValue:
    """The owned part of a unit's gradient as a value. `Gradient` moves its state; only zeros are written here."""

    def __init__(self, layout: Layout, owned: tuple[int, int], store: GradientArray, device: torch.device) -> None:
        self.layout, self.owned, self.store = layout, owned, store
        self._device = device
        self.state = GradientState.EMPTY
        self._use = Use(len(layout.slots))
        self.factor: ScaleFactor = 1.0
        self.reading: Handle | None = None  # the update in flight that reads the array
        self.changes = 0  # so that results computed from it are known to be outdated
        self._lent = Lent(store)
        self._noted = Noted()
        self._squares: torch.Tensor | float | None = None
        self.counted: list[tuple[int, int]] | None = None  # the stretches whose squares count; None: all of it

    @property
    def tier(self) -> str:
        return self.store.tier

    @property
    def used(self) -> bytearray:
        """Which parameters have a gradient, one flag each."""
        return self._use.flags

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps all of it."""
        return self.owned == (0, self.layout.numel)

    @property
    def is_lent(self) -> bool:
        """Whether users may hold memory of it: then changes of the gradient must show there at once."""
        return bool(self._lent) or self._lent.has_array()

    def scale(self, factor: ScaleFactor) -> None:
        self._touch()
        if self.is_lent:
            self.apply_changes()
        self.factor = times(self.factor, factor)
        if self.is_lent:
            self.apply_factor()

    @property
    def is_measured_together(self) -> bool:
        """Whether its squares are taken together with those of others: a GPU has it, and launches take time."""
        return self._device.type == "cuda" and self.tier == "device" and self.counted is None

    def unmeasured(self) -> torch.Tensor | None:
        """The array on a GPU whose squares nobody has taken yet."""
        if self._squares is not None or self.state is not GradientState.HELD or self.store.array is None:
            return None
        return self.store.array.direct if self.is_measured_together else None

    def put_squares(self, squares: torch.Tensor) -> None:
        """Those of `unmeasured`."""
        self._squares = squares

    def squares(self) -> torch.Tensor | float:
        """The sum of squares of this rank's part: a float, or a scalar tensor if the device has it."""
        self.refuse_spent()
        self.apply_changes()
        if self._squares is None or self.is_lent:
            self._squares = self._counted_squares() if self.state is GradientState.HELD else 0.0
        return self._scaled(self._squares)

    def slot_squares(self) -> list[torch.Tensor | float]:
        """The sum of squares of this rank's part of each parameter's gradient."""
        self.refuse_spent()
        self.apply_changes()
        held = self.state is GradientState.HELD
        ranges = [self._range(index) for index in range(len(self.used))]
        return [self._scaled(self.store.squares(*stretch)) if held else 0.0 for stretch in ranges]

    # -- what was noted and lent ------------------------------------------------------------------------------------

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

    def apply_factor(self) -> None:
        """Makes the array equal to the gradient: writes zeros, multiplies by the factor."""
        self._finish_reading()
        if self.state is GradientState.ZERO:
            where = self._device if self.store.tier == "device" else torch.device("cpu")
            self.store.store(new_tensor(self.store.numel, self.store.wire, where).zero_())
            self.state, self.factor = GradientState.HELD, 1.0
        if not is_one(self.factor):
            factor, self.factor = self.factor, 1.0
            self.store.multiply(0, self.store.numel, factor)
            self._squares = None
            for _, value in self._lent:
                scale_tensor(value, factor)

    def lend_whole(self, flat: torch.Tensor, tensor: Axis) -> None:
        """All ranks of `tensor` must call this. Lends every parameter's whole gradient until `end_lending`.

        `flat` has what the ranks of the data axis keep; of a parameter that `tensor` cuts, that is a part. It stays
        lent even if nobody here holds it: ranks that held others would not meet in the next call.
        """
        for index, slot in enumerate(self.layout.slots):
            if not self.used[index]:
                continue
            value = flat[slot.start : slot.stop].view(slot.shape)
            if slot.cut is not None:
                whole = join_cut(slot.cut, value, tensor)  # also if this rank has it: others may not
                if not self.is_joined(index):
                    self._lent.leave(index)
                    self._lent.put(index, whole, stays=True)
            elif not self.is_whole and index not in self._lent:
                self._lent.put(index, value, stays=True)

    def is_joined(self, index: int) -> bool:
        """Whether a parameter's gradient is lent as a whole, or the tensor axis does not cut it."""
        cut = self.layout.slots[index].cut
        return cut is None or (index in self._lent and tuple(self._lent.get(index).shape) == cut.shape)

    def end_lending(self) -> None:
        """Takes over what was written to it; from now on, what users still hold of a part that others own is a copy."""
        self.apply_changes()
        for index, _ in self._lent:
            if not self.is_whole or self.layout.slots[index].cut is not None:
                self._lent.pop(index)

    def _apply_notes(self) -> None:
        """Clears and scales single slots. Those that a user works on have no notes."""
        cleared, factors = self._noted.take()
        if cleared or factors:
            self._squares = None
            self._finish_reading()
        for index in cleared if self.state is GradientState.HELD else ():
            self.store.clear(*self._range(index))
        for index, factor in factors.items():
            self.store.multiply(*self._range(index), factor)

    def _write_back(self, index: int, value: torch.Tensor) -> None:
        slot = self.layout.slots[index]
        if slot.cut is not None and self.is_joined(index):
            value = slot.cut.take(value)
        start, stop = self._range(index)
        first = slot.start - self.owned[0]
        part = value.reshape(-1)[start - first : stop - first] if start < stop else value.new_empty(0)
        self._lent.write_back(start, part)

    def _show_lent(self) -> None:
        """Copies the array's values to memory that users hold, if it has all of them."""
        if not self.is_whole:
            self._lent.clear()
        for index, value in self._lent:
            value.copy_(self.store.copy(*self._range(index)).view(value.shape))

    # -- inside -----------------------------------------------------------------------------------------------------

    def refuse_spent(self) -> None:
        """Raises where an update inside the backward has used the gradient up."""
        if self.state is GradientState.SPENT:
            spent.refuse_use(self.layout.slots[0].name)

    def _counted_squares(self) -> torch.Tensor | float:
        """The squares of what this rank counts; if several ranks hold something, one counts it."""
        total: torch.Tensor | float = 0.0
        for start, stop in self._counted_ranges():
            total = self.store.squares(start, stop) + total
        return total

    def _counted_ranges(self) -> list[tuple[int, int]]:
        return [(0, self.store.numel)] if self.counted is None else self.counted

    def _scaled(self, square: torch.Tensor | float) -> torch.Tensor | float:
        return square if is_one(self.factor) else square * self.factor**2

    def _range(self, index: int) -> tuple[int, int]:
        """This rank's part of a slot, as a range inside the owned part."""
        slot = self.layout.slots[index]
        part = clip_range(slot.start, slot.stop, *self.owned)
        return (part[0] - self.owned[0], part[1] - self.owned[0]) if part else (0, 0)

    def _touch(self) -> None:
        self.changes += 1
        self._squares = None

    def _forget_changes(self) -> None:
        self._touch()
        self.factor, self._noted = 1.0, Noted()
        self._lent.clear()

    def _finish_reading(self) -> None:
        if self.reading is not None:
            self.reading.finish()
            self.reading = None


def measure_together(gradients: Iterable[GradientValue]) -> None:
    """Takes the squares of all those whose arrays a GPU has, unless they are known."""
    waiting = [(gradient, part) for gradient in gradients if (part := gradient.unmeasured()) is not None]
    squares = device_squares([part for _, part in waiting]) if waiting else ()
    for (gradient, _), square in zip(waiting, squares, strict=True):
        gradient.put_squares(square)
