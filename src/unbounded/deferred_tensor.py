"""A tensor whose shape is known and whose values are made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Tensor = torch.Tensor
METADATA = {
    getattr(_Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta",
                 "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "is_mkldnn")
} | {
    _Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, _Tensor.element_size,
    _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.__len__, _Tensor.__hash__, _Tensor.get_device,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
}  # fmt: skip
"""What is answered without the values."""


class DeferredTensor(torch.Tensor):
    """A subclass says in `make` where the values come from. Whatever is not metadata works on those."""

    def make(self) -> torch.Tensor:
        """The values as a plain tensor, in the graph if this tensor needs gradients."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*make_all(args), **make_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*make_all(args), **make_all(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.make())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.make().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.make().__deepcopy__(memo)


def make_all(value: Any) -> Any:
    """`value` with the deferred tensors in it made."""
    return pytree.tree_map_only(DeferredTensor, lambda deferred: deferred.make(), value)
