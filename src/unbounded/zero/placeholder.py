"""Tensors that stand for values kept elsewhere: what they answer by themselves, and how others treat them.

A function of several tensors goes to the `__torch_function__` of one of them. If that one computes with torch's own
dispatch switched off, it would read the data of a placeholder, which are not its values. So it must let the placeholder
answer first (`meets_placeholder`), which puts its values in and calls the function again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from unbounded.calls import called_from
from unbounded.errors import StateError

_Tensor = torch.Tensor


class Placeholder:
    """A base of tensors whose own data are not their values. Its `__torch_function__` puts them in."""

    __slots__ = ()


def describe(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a placeholder answers without its values; NotImplemented if they are needed."""
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            if func is _Tensor.is_complex and not args[0].is_contiguous():
                _refuse_output()
            return func(*args, **kwargs)
    if func in _LAYOUT and isinstance(args[0], Placeholder):  # values are lent row by row
        return func(torch.empty(args[0].shape, dtype=torch.uint8, device="meta"), *args[1:], **kwargs)  # type: ignore[attr-defined]
    return NotImplemented


def _refuse_output() -> None:
    """Raises where a stand-in is about to be filled by the one collective that asks neither it nor its strides."""
    if called_from(inspect.unwrap(dist.all_to_all_single)):
        raise StateError(
            "all_to_all_single was given a sharded tensor as its output, whose memory is elsewhere, and would write "
            "past what it has here. Receive into a tensor of your own and copy it: p.data.copy_(received)."
        )


def meets_placeholder(types: Iterable[type]) -> bool:
    """Whether a function, given tensors of these types, is for a placeholder to answer: return NotImplemented."""
    return any(issubclass(kind, Placeholder) for kind in types)


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of a placeholder: one NaN (one 0 for integers) spread over a shape."""
    filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), filler, dtype=dtype, device=device).expand(shape)


def as_set(placeholder: torch.Tensor, source: tuple[Any, ...]) -> torch.Tensor:
    """What a tensor shows after `set_(*source)`, the only write that torch does not send to `__torch_function__`."""
    values: list[Any] = [part.detach() if isinstance(part, _Tensor) else part for part in source]
    return torch.empty(0, dtype=placeholder.dtype, device=placeholder.device).set_(*values)


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names if hasattr(_Tensor, name)}


# What the data that a placeholder has instead of its values answer correctly.
METADATA = _getters(
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "itemsize", "nbytes", "names",
    "_backward_hooks", "_version", "output_nr", "retains_grad", "is_sparse_csr", "grad_dtype",
) | {
    _Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, _Tensor.element_size,
    _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed, _Tensor.__len__, _Tensor.__hash__,
    _Tensor.get_device, _Tensor.is_inference, _Tensor._is_view, torch.is_floating_point,
    torch.is_complex, torch.numel, torch.is_tensor, _Tensor.is_same_size,
}  # fmt: skip
_LAYOUT = {_Tensor.is_contiguous, _Tensor.stride}
