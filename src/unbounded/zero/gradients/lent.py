"""Single gradients in separate memory, which belongs to the gradient as long as a user holds a tensor over it.

`p.grad.data`, a view of `p.grad`, or what a user has made `p.grad`: in plain PyTorch writing to it is writing to the
gradient, also after clipping, another backward or a step. If the engine keeps the gradient elsewhere, it writes such
memory back before it reads the gradient, and brings it up to date after it has changed the gradient. The number of
owners shows whether somebody holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_owners = torch._C._storage_Use_Count


class Lent:
    """Tensors by slot."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return iter(list(self._values.items()))

    def put(self, index: int, value: torch.Tensor) -> None:
        """Makes the memory of `value` that of a slot."""
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

    def clear(self) -> None:
        self._values.clear()

    def drop_unheld(self) -> None:
        self._values = {index: value for index, value in self._values.items() if is_held(value)}


def is_held(value: torch.Tensor) -> bool:
    """Whether there are other tensors over its memory."""
    storage = value.untyped_storage()
    return bool(_owners(storage._cdata) > 2)  # `value` and `storage`
