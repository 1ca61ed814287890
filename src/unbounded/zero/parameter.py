"""What the user can reach between forwards: the same Parameter objects, managed by their unit.

A managed parameter keeps its identity, name, shape, dtype and place in the optimizer. While its unit is
partitioned or offloaded its data is one element of NaN spread over the true shape, so no tensor over freed
memory exists; every computation on it comes through `__torch_function__`, which puts the gathered value in its
place where that is safe and refuses with a remedy where it is not. Inside forwards the modules hold plain
tensors instead, so none of this is on the hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.zero.parameter_grad import drop_grad, read_grad

if TYPE_CHECKING:
    from unbounded.zero.unit import Unit

_Tensor = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names if hasattr(_Tensor, name)}


# What a placeholder answers truly without its values.
_METADATA = _getters(
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "itemsize", "nbytes", "names",
    "_backward_hooks", "_version", "output_nr", "retains_grad",
) | {
    _Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, _Tensor.element_size,
    _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed, _Tensor.__len__, _Tensor.__hash__,
    _Tensor.get_device, _Tensor.is_contiguous, _Tensor.is_inference, torch.is_floating_point,
    torch.is_complex, torch.numel, torch.is_tensor, _Tensor.is_same_size,
}  # fmt: skip


class ManagedParameter(nn.Parameter):
    """A parameter whose value and gradient are kept by its unit. Made from a Parameter by `manage`."""

    _unit: Unit
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        owner = args[0] if args and isinstance(args[0], ManagedParameter) else None
        if name == "detach" and owner is not None and owner._unit.keeper.collecting:
            with torch._C.DisableTorchFunctionSubclass():  # `state_dict` fills the values in afterwards
                return torch.empty_like(owner, device="meta")
        if owner is not None and (name == "requires_grad_" or func == _SET_REQUIRES_GRAD):
            return owner._freeze(not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
        if owner is not None and (name in _REFUSED or name in _MOVES or _writes_in_place(name)):
            raise StateError(
                f"{name.strip('_')}() would change the parameter {owner.name!r} behind the engine that keeps it. "
                "Write to it inside `with unbounded.full_params(model):`, and freeze, move or hook it before `shard`."
            )
        args, kwargs = pytree.tree_map_only(ManagedParameter, lambda p: p._unit.borrow(p), (args, kwargs))
        return func(*args, **kwargs)

    def _freeze(self, is_frozen: bool) -> ManagedParameter:
        """Leaves the parameter's gradient out from the next backward on, or takes it in again."""
        if not self._unit.trainable and not is_frozen:
            raise StateError(
                f"the parameter {self.name!r} was frozen when the model was sharded and has no optimizer states, so it "
                "cannot be trained now. Call `shard` with it trainable, and freeze it afterwards."
            )
        with torch._C.DisableTorchFunctionSubclass():
            _SET_REQUIRES_GRAD(self, not is_frozen)
        (self._unit.frozen.add if is_frozen else self._unit.frozen.discard)(self._index)
        return self

    @property
    def name(self) -> str:  # type: ignore[override]
        """The full name in the model."""
        return self._unit.layout.slots[self._index].name

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient where this rank holds it whole; None before there is one; else refuses."""
        return read_grad(self._unit, self._index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise StateError(
                f"the gradient of {self.name!r} is kept by the engine and cannot be replaced. "
                "Scale the loss, or clip with `optimizer.clip_grad_norm_(max_norm)`."
            )
        drop_grad(self._unit, self._index)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The value: to write to where it is all there is of the parameter, else a copy that refuses to be written."""
        value = self._unit.borrow(self).detach()
        return value if self._unit.is_all_there_is else value.as_subclass(ReadOnly)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise StateError(
            f"the data of {self.name!r} cannot be replaced behind the engine that keeps it. "
            "Write to it inside `with unbounded.full_params(model):`."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, {self._unit.describe()})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(f"the parameter {self.name!r} is sharded and cannot be copied. {_SAVE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(f"the parameter {self.name!r} is sharded and cannot be pickled. {_SAVE}")


class ReadOnly(torch.Tensor):
    """A copy of a parameter's value. Writing to it would be lost, so it is refused; what is computed from it is not."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if args and isinstance(args[0], ReadOnly) and (_writes_in_place(name) or name == "__setitem__"):
            raise StateError(
                f"{name.strip('_')}() would write to a copy of a sharded parameter, and be lost. "
                "Write to the parameter inside `with unbounded.full_params(model):`."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_SAVE = "Copy the model before `shard`, or use `unbounded.save`, `unbounded.export` or `model.state_dict()`."
_MOVES = {"to", "cuda", "cpu", "half", "bfloat16", "float", "double", "type"}
_REFUSED = {
    "__set__", "register_hook", "register_post_accumulate_grad_hook", "backward", "__setitem__",
    "__setstate__", "pin_memory", "share_memory_", "set_", "resize_", "retain_grad",
}  # fmt: skip


_SET_REQUIRES_GRAD = _Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _writes_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    )


def manage(parameter: nn.Parameter, unit: Unit, index: int) -> ManagedParameter:
    """Turns `parameter` into a managed one, keeping the object."""
    parameter.grad = None
    if parameter.is_meta:  # a tensor cannot take data of a real device while it is on meta
        stand_in = torch.zeros((), dtype=parameter.dtype, device=unit.device).expand(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
    parameter.__class__ = ManagedParameter
    assert isinstance(parameter, ManagedParameter)
    parameter._unit, parameter._index = unit, index
    return parameter


def unmanage(parameter: ManagedParameter, value: torch.Tensor) -> nn.Parameter:
    """Turns a managed parameter back into a plain one that holds `value`."""
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    del parameter._unit, parameter._index
    parameter.data = value
    return parameter


def show(parameter: ManagedParameter, value: torch.Tensor) -> None:
    """Lets the parameter's own data be `value`."""
    with torch._C.DisableTorchFunctionSubclass():
        _Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


def hide(parameter: ManagedParameter, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Replaces the parameter's own data by one NaN (one 0 for integers) spread over its shape."""
    filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    show(parameter, torch.full((), filler, dtype=dtype, device=device).expand(shape))
