"""Memory of a unit's gradient that users hold: single gradients in separate memory, or the array itself on the device.

Writing to `p.grad.data`, to a view of `p.grad`, or to what a user has made `p.grad` is writing to the gradient in plain
PyTorch, also after clipping, another backward or a step. So such memory belongs to the gradient as long as a user holds
a tensor over it, which the number of owners shows. Where the engine keeps the gradient elsewhere, it writes the memory
back before it reads the gradient, and brings it up to date after it has changed the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unbounded.errors import StateError
from unbounded.zero.gradients.gradient_array import GradientArray

_owners = torch._C._storage_Use_Count


class Lent:
    """Tensors in separate memory by slot, and whether somebody was given memory of the array in `store`."""

    def __init__(self, store: GradientArray) -> None:
        self._store = store
        self._values: dict[int, torch.Tensor] = {}
        self._staying: set[int] = set()
        self._is_array_lent = False

    def __bool__(self) -> bool:
        """Whether any slot has separate memory."""
        return bool(self._values)

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return iter(list(self._values.items()))

    def put(self, index: int, value: torch.Tensor, *, stays: bool = False) -> None:
        """Makes the memory of `value` that of a slot; if it `stays`, until it is taken away, whoever holds it."""
        if stays:
            self._staying.add(index)
        # With no owner but itself: a view would keep its base alive.
        alone = torch.empty(0, dtype=value.dtype, device=value.device)
        self._values[index] = alone.set_(
            value.untyped_storage(),
            value.storage_offset(),
            value.shape,
            value.stride(),  # type: ignore[call-overload]
        )

    def get(self, index: int) -> torch.Tensor:
        """A tensor over the slot's memory, for the user."""
        return self._values[index].detach()

    def pop(self, index: int) -> None:
        """From now on the memory belongs only to the user."""
        self._values.pop(index, None)
        self._staying.discard(index)

    def clear(self) -> None:
        """From now on all of it belongs only to users."""
        self._values.clear()
        self._staying.clear()
        self._is_array_lent = False

    def drop_unheld(self) -> None:
        self._values = {i: value for i, value in self._values.items() if i in self._staying or _is_held(value)}

    def write_back(self, start: int, part: torch.Tensor) -> None:
        """Writes a slot's values to the array, from `start` on."""
        if part.dtype != self._store.dtype:  # the sum has become wider since: what was not written to keeps its bits
            held = self._store.copy(start, start + part.numel())
            part = part.to(held.device)
            part = torch.where(part == held.to(part.dtype), held, part.to(held.dtype))
        self._store.write(start, part)

    def lend_array(self) -> torch.Tensor:
        """The array, which is on the device, for users to hold parts of."""
        self._is_array_lent = True
        self._store.outlast_stream()  # users free it whenever they like
        return self._store.array.direct  # type: ignore[union-attr,return-value]

    def has_array(self) -> bool:
        """Whether a user holds memory of the array."""
        if self._is_array_lent:
            array = self._store.array
            self._is_array_lent = array is not None and _is_held(array.direct)  # type: ignore[arg-type]
        return self._is_array_lent

    def leave(self, index: int) -> None:
        """From now on, what users hold of one slot belongs only to them."""
        self.pop(index)
        if self.has_array():
            self._store.leave()
            self._is_array_lent = False

    def refuse_widening(self, name: str) -> None:
        """Raises where the next backward adds up in other memory than users hold; `name` is a parameter of the unit."""
        if self._store.widens and self.has_array():
            raise StateError(
                f"a view of a gradient ({name!r} or another of its unit) is still held, but this backward adds up in "
                f"{self._store.sum_dtype}, in other memory. Clone what is kept of gradients."
            )


def _is_held(value: torch.Tensor) -> bool:
    """Whether there are other tensors over its memory."""
    storage = value.untyped_storage()
    return bool(_owners(storage._cdata) > 2)  # `value` and `storage`
