"""What autograd saves in a forward: weights by name, everything else unchanged.

A weight that a backward will read again is saved as a *token*: which unit, which part of its buffer, which generation
of its values, and how often forwards had written to it. Nothing in a graph therefore holds the bytes of a gathered
unit, which may go as soon as the modules are done with them, and a backward that nobody announced (a penalty, an
auxiliary loss kept in a list, a second walk through the same graph) fetches what it reads. If an optimizer step or a
write came between the use and its backward, the token is outdated and raises, as plain PyTorch's version counters do.

Whatever holds a weight despite these hooks (other saved-tensor hooks, a user's own reference) holds the storage itself.
The unit sees that in the storage's count of owners and leaves it to them (`Unit.deallocate`).

If no weights of a model ever come or go, graphs hold them as in plain PyTorch, without hooks, and a change of them
raises the versions of what was given out (`ModuleViews.note_change`).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class Weights(Protocol):
    """A unit as a graph sees it: a buffer whose parts can be fetched again."""

    name: str
    dtype: torch.dtype
    storage: torch.UntypedStorage
    generation: int

    def count_writes(self, offset: int) -> int:
        """How often forwards have written in place to the parameter at `offset` so far."""

    def part(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """A view of the gathered buffer, which is fetched if it is not there."""


_homes: dict[int, weakref.ref[Weights]] = {}  # units by the address of their storage


class SavedWeight(NamedTuple):
    """A part of a unit's gathered buffer, to be read in a backward."""

    unit: Weights
    generation: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    num_writes: int

    def read(self) -> torch.Tensor:
        unit = self.unit
        if self.generation != unit.generation:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weights of unit {unit.name!r} were updated {unit.generation - self.generation} times since this "
                "graph was built, by optimizer.step(), inside a backward, or by a write. Run the backward before the "
                "step, or the forward again after it."
            )
        if self.num_writes != unit.count_writes(self.offset):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"forward wrote to a weight of unit {unit.name!r}, of shape {list(self.shape)}, after using it. Write "
                "to it before it is used, or after the backward."
            )
        return unit.part(self.shape, self.stride, self.offset)


class SavedTensor(NamedTuple):
    """Any other tensor, with the version that it must still have."""

    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self.tensor.type()} of shape {list(self.tensor.shape)} is at version {self.tensor._version}; "
                f"expected version {self.version} instead. Hint: torch.autograd.set_detect_anomaly(True) finds the "
                "operation whose gradient failed."
            )
        return self.tensor


def _pack(tensor: torch.Tensor) -> Any:
    # Not the tensor itself, because an output that its own node saved would keep itself alive.
    return save_by_name(tensor) or SavedTensor(tensor.detach(), 0 if tensor.is_inference() else tensor._version)


def save_by_name(tensor: torch.Tensor) -> SavedWeight | None:
    """What to keep of a weight until it is read in a backward; None for any other tensor."""
    try:
        home = _homes.get(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without its own storage
        return None
    unit = home() if home is not None else None
    if unit is None or tensor.dtype != unit.dtype or tensor.is_conj():
        return None
    offset = int(tensor.storage_offset())
    return SavedWeight(unit, unit.generation, tensor.shape, tensor.stride(), offset, unit.count_writes(offset))


def _unpack(saved: SavedWeight | SavedTensor) -> torch.Tensor:
    return saved.read()


def is_of_unit(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is over the gathered buffer of a unit."""
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in _homes


def settle_in(unit: Weights) -> None:
    """`unit` has a new storage: what is saved from it is saved by name."""
    _homes[unit.storage._cdata] = weakref.ref(unit)


def move_out(unit: Weights, homes: dict[int, weakref.ref[Weights]] = _homes) -> None:
    """The storage of `unit` is freed, or left to whoever holds it."""
    homes.pop(unit.storage._cdata, None)


class Saving(threading.local):
    """Saved-tensor hooks around the outermost forward of each thread. Inside other hooks they are not set."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_pushed = False

    @property
    def is_entered(self) -> bool:
        return self._depth > 0

    def enter(self, *, is_needed: bool) -> None:
        """A site's forward begins; `is_needed`: weights come and go, or somebody follows who reads them."""
        self._depth += 1
        if self._depth == 1 and is_needed and torch.is_grad_enabled() and _is_free():
            try:
                _push(_pack, _unpack)
                self._is_pushed = True
            except RuntimeError:  # somebody has disabled such hooks, as torch.func does
                self._is_pushed = False

    def leave(self) -> None:
        """A site's forward is over."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._is_pushed:
            self._is_pushed = False
            if _top_hooks is None or _is_ours():
                _pop()

    def reset(self) -> None:
        """Forwards were interrupted by something that no hook sees."""
        if self._depth:
            self._depth = 1
            self.leave()


def _is_free() -> bool:
    """Whether there are no other hooks here. Those of another sharded model also work for this one."""
    return _top_hooks is None or _top_hooks(True) is None


def _is_ours() -> bool:
    hooks = _top_hooks(True) if _top_hooks is not None else None
    return hooks is not None and hooks[0] is _pack
