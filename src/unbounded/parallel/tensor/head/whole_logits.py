"""Logits of all classes in the output of a training forward whose loss was computed from parts of them.

Most training loops never look at them, so they are joined when somebody does: for an accuracy, an entropy, a second
loss. Only their shape, dtype and device are known before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Tensor = torch.Tensor
_METADATA = {
    getattr(_Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta")
} | {_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.is_floating_point, _Tensor.__len__, _Tensor.__hash__}


class WholeLogits(torch.Tensor):
    """All ranks of the axis must look at it alike. `join` makes all classes from a rank's `part`, in the graph."""

    _join: Callable[[], torch.Tensor]
    _made: torch.Tensor | None

    @staticmethod
    def __new__(  # type: ignore[misc]
        cls: type[WholeLogits], part: torch.Tensor, num_classes: int, join: Callable[[], torch.Tensor]
    ) -> WholeLogits:
        whole = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (*part.shape[:-1], num_classes), dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        whole._join, whole._made = join, None
        return whole

    def make(self) -> torch.Tensor:
        """The logits of all classes."""
        if self._made is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._made = self._join()
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_make_all(args), **_make_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_make_all(args), **_make_all(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.make())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.make().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.make().__deepcopy__(memo)


def _make_all(value: Any) -> Any:
    return pytree.tree_map_only(WholeLogits, lambda whole: whole.make(), value)
