"""What operations give of a tiled weight or of its gradient that is a view: the memory is that of a copy, joined.

A view of a weight is brought up to date before it is used after a change of the weights, and what is written to it
goes on to the tiles. A gradient is read as any tensor; a write to a view of it would be lost, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.zero.gradients.managed_grad import METADATA
from unbounded.zero.parameters.parameter import shares, version_of


class Joined(Protocol):
    """Who has made a copy."""

    def changes(self) -> list[tuple[int, int]] | None:
        """How often what was copied has changed; None where nothing that is written to a copy can be kept."""

    def join(self) -> torch.Tensor:
        """Another copy."""

    def keep(self, whole: torch.Tensor) -> None:
        """Keeps what was written to a copy."""


class TiledView(torch.Tensor):
    """See the module's docstring. `_whole` is all of the copy."""

    _owner: Joined
    _whole: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lent: list[tuple[TiledView, torch.Tensor, int]] = []

        def lend(view: TiledView) -> torch.Tensor:
            view._renew()
            with torch._C.DisableTorchFunctionSubclass():
                plain = view.as_subclass(torch.Tensor)
            lent.append((view, plain, version_of(plain)))
            return plain

        args, kwargs = pytree.tree_map_only(TiledView, lend, (args, kwargs))
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in ("numpy", "__array__"):
            result.setflags(write=False)  # a write to it could not be seen
        for view, plain, version in lent:
            if version_of(plain) != version:
                view._keep(getattr(func, "__name__", "this"))
                result = view if result is plain else result
            result = follow(result, view._owner, view._whole)
        return result

    def _keep(self, name: str) -> None:
        if self._owner.changes() is None:
            raise StateError(
                f"{name}() would write to a copy of the gradient of a tiled weight, and be lost. Multiply or clear the "
                "gradient itself (grad.mul_(2), grad.zero_()), give another one (weight.grad = ...), or leave the "
                "layer untiled."
            )
        self._owner.keep(self._whole)
        self._whole._changes = self._owner.changes()  # type: ignore[attr-defined]

    def _renew(self) -> None:
        changes = self._owner.changes()
        if changes != self._whole._changes:  # type: ignore[attr-defined]
            with torch.no_grad():
                self._whole.copy_(self._owner.join())
            self._whole._changes = changes  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def follow(result: Any, owner: Joined, whole: torch.Tensor) -> Any:
    """`result`, where tensors in it that share memory with `whole` say what is written to them."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, TiledView) or tensor.requires_grad or not shares(tensor, whole):
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            view = tensor.as_subclass(TiledView)
        view._owner, view._whole = owner, whole
        if not hasattr(whole, "_changes"):
            whole._changes = owner.changes()  # type: ignore[attr-defined]
        return view

    if isinstance(result, torch.Tensor):
        return wrap(result)
    return pytree.tree_map_only(torch.Tensor, wrap, result) if isinstance(result, (list, tuple)) else result
