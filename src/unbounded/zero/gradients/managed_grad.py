"""`.grad` of a managed parameter: a tensor by shape, dtype and device, whose values stay where the engine keeps them.

Looking at it costs nothing, so `model.zero_grad()` and `p.grad is not None` are free. Norms and multiplications by a
number, which is what clipping and unscaling do, work wherever the gradient is: `torch.nn.utils.clip_grad_norm_` and
`torch.amp.GradScaler` therefore work over all ranks and tiers. Any other computation uses the values if this rank holds
them whole, and is refused otherwise. A handle that outlives its gradient keeps its values.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.zero.gradients.gradient import Gradient
from unbounded.zero.gradients.scale_factor import ScaleFactor, factor_of
from unbounded.zero.placeholder import Placeholder, as_set, describe, stand_in

_SCALES = {"mul_", "div_", "__imul__", "__itruediv__"}


class Owner(Protocol):
    """The unit as its gradients see it."""

    name: str
    device: torch.device
    gradient: Gradient
    engine: Any

    @property
    def is_whole(self) -> bool: ...


class ManagedGrad(Placeholder, torch.Tensor):
    """The gradient of one parameter. Made by `grad_of`."""

    _unit: Owner
    _index: int
    _is_kept: bool = True  # by the engine, which has not dropped it yet
    _own: torch.Tensor | None = None  # its values afterwards, if this rank had them

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (answer := describe(func, args, kwargs)) is not NotImplemented:
            return answer
        first = args[0] if args else None
        if isinstance(first, ManagedGrad) and name in ("requires_grad_", "detach_"):
            return first  # it never has a graph
        if isinstance(first, ManagedGrad) and first._is_kept:
            with turn_of(first._unit):
                done = _answer(name, first, args, kwargs)
            if done:
                return done[0]
        if isinstance(first, (list, tuple)) and name in _LISTS:
            return _LISTS[name](*args, **kwargs)
        values, filled = _open_all((args, kwargs))
        result = func(*filled[0], **filled[1])
        return next((grad for grad, value in values if result is value), result)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.open()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with turn_of(self._unit):
            now = self.open()
            value = value.detach()
            if value.data_ptr() == now.data_ptr() and value.stride() == now.stride():  # after `grad.data /= 2`
                return
            if value.shape != now.shape:
                raise RuntimeError(f"a gradient of {tuple(now.shape)} cannot become one of {tuple(value.shape)}.")
            if self._is_kept:
                self._unit.gradient.put_slot(self._index, value)
            else:
                self._own = value

    def set_(self, *source: Any) -> ManagedGrad:  # type: ignore[override]
        self.data = as_set(self, source)
        return self

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        return None

    def open(self) -> torch.Tensor:
        """The values themselves; writes to them count."""
        with turn_of(self._unit):
            return self._own if self._own is not None else self._open()

    def _open(self) -> torch.Tensor:
        gradient = self._unit.gradient
        if self._is_kept:
            gradient.refuse_spent()
        gradient.order_stream()
        if self._is_kept and tuple(self.shape) != shown_shape(self._unit, self._index):
            raise StateError(
                f"the gradient of {gradient.layout.slots[self._index].name!r} is a part of the whole one outside "
                "unbounded.full_params() and the whole one inside, because the tensor axis cuts it. This one was taken "
                "on the other side of its beginning or end: take p.grad again."
            )
        if self._is_kept and self._unit.engine.is_shown and not gradient.is_open(self._index, joined=True):
            self._unit.engine.gradients.lend(self._unit)
        if not self._is_kept or not gradient.is_open(self._index):
            raise StateError(
                f"the gradient of {gradient.layout.slots[self._index].name!r} is not held whole by this rank "
                f"(partitioned, kept on {gradient.tier}, not reduced yet, already used or cleared), so it cannot be "
                "read here. Read and change it inside `with unbounded.full_params(model):` on every rank; clip its "
                "2-norm with torch.nn.utils.clip_grad_norm_ and clear with optimizer.zero_grad."
            )
        return gradient.open_slot(self._index)

    def let_go(self) -> None:
        """The engine drops the gradient: this keeps its last values, if this rank has them."""
        gradient = self._unit.gradient
        gradient.order_stream()
        is_open = gradient.is_open(self._index) and gradient.open_shape(self._index) == tuple(self.shape)
        self._own = gradient.take_slot(self._index) if is_open else None
        self._is_kept = False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.open()) if self._own is not None or self._unit.is_whole else f"<gradient of {self._unit.name}>"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.open().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.open().clone().__reduce_ex__(protocol)


_alive: weakref.WeakKeyDictionary[Gradient, dict[int, weakref.ref[ManagedGrad]]] = weakref.WeakKeyDictionary()
_blanks: weakref.WeakKeyDictionary[Gradient, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()


def turn_of(unit: Any) -> AbstractContextManager[None]:
    """Inside, no other thread uses the model; a gradient may outlive it."""
    try:
        return unit.engine.turn()  # type: ignore[no-any-return]
    except ReferenceError:
        return nullcontext()


def shown_shape(unit: Any, index: int) -> tuple[int, ...]:
    """The shape of a parameter's gradient: that of this rank's part, or of the whole inside full_params."""
    slot = unit.gradient.layout.slots[index]
    return slot.cut.shape if slot.cut is not None and unit.engine.is_shown else slot.shape  # type: ignore[no-any-return]


def grad_of(unit: Any, index: int) -> ManagedGrad | None:
    """`.grad` of the parameter at `index`, the same object while anybody holds it."""
    with turn_of(unit):
        return _grad_of(unit, index)


def _grad_of(unit: Any, index: int) -> ManagedGrad | None:
    gradient: Gradient = unit.gradient
    if not unit.trainable or not gradient.used[index]:
        return None
    alive = _alive.setdefault(gradient, {})
    reference = alive.get(index)
    grad = reference() if reference is not None else None
    dtype = gradient.dtype
    if grad is None or not grad._is_kept or grad.dtype != dtype or tuple(grad.shape) != shown_shape(unit, index):
        grad = torch.Tensor._make_subclass(ManagedGrad, _blank(unit, index, dtype))
        grad._unit, grad._index = unit, index
        alive[index] = weakref.ref(grad)
    return grad


def _blank(unit: Any, index: int, dtype: torch.dtype) -> torch.Tensor:
    """What a handle holds in place of values: NaN, for code that reads it past `__torch_function__` (`torch.tensor`).

    It is kept, because frameworks ask for every gradient in every step.
    """
    blanks = _blanks.setdefault(unit.gradient, {})
    blank = blanks.get(index)
    shape = shown_shape(unit, index)
    if blank is None or blank.dtype != dtype or tuple(blank.shape) != shape:
        blank = blanks[index] = stand_in(shape, dtype, unit.device)
    return blank


def keep_alive(gradient: Gradient, indices: Iterable[int] | None = None) -> None:
    """Called before gradients are dropped or replaced, so that what users still hold keeps its values."""
    alive = _alive.get(gradient, {})
    for index in list(alive) if indices is None else indices:
        reference = alive.pop(index, None)
        grad = reference() if reference is not None else None
        if grad is not None and grad._is_kept and gradient.used[index]:
            grad.let_go()


def _answer(name: str, grad: ManagedGrad, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Operations that work where the gradient is kept: clearing, multiplying by a number, measuring."""
    gradient, index = grad._unit.gradient, grad._index
    if name == "zero_":
        gradient.order_stream()
        gradient.zero_slot(index)
        return (grad,)
    if name in _SCALES and len(args) == 2 and not kwargs and _is_number(args[1], grad.ndim):
        factor = factor_of(args[1])
        gradient.order_stream()
        gradient.scale_slot(index, factor if "mul" in name else _reciprocal(factor))
        return (grad,)
    order = _norm_order(name, args, kwargs)
    if order is not None and order == 2.0:
        return (_norm(grad, kwargs.get("dtype")),)
    return None


def _reciprocal(factor: ScaleFactor) -> ScaleFactor:
    if isinstance(factor, torch.Tensor):
        return 1.0 / factor
    return 1.0 / factor if factor else math.copysign(math.inf, factor)


def _norm_order(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The order of a norm over the whole tensor, or None if it is another kind."""
    said = {key for key, value in kwargs.items() if value is not None and value is not False}  # dim=None, keepdim=False
    if name not in ("norm", "vector_norm", "linalg_vector_norm") or said - {"p", "ord", "dtype"}:
        return None
    order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
    return float(order) if len(args) <= 2 and isinstance(order, (int, float)) else 2.0 if order == "fro" else None


def _is_number(value: Any, ndim: int) -> bool:
    """Whether a gradient of `ndim` dims times `value` is the gradient times a real number."""
    if isinstance(value, torch.Tensor):
        is_scalar = value.numel() == 1 and value.ndim <= ndim and not value.is_complex()
        return is_scalar and not isinstance(value, ManagedGrad)
    return isinstance(value, (int, float))


def _norm(grad: ManagedGrad, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All ranks of the axis must call this if the gradient is partitioned."""
    norm: torch.Tensor = grad._unit.engine.gradients.slot_norms(grad._unit)[grad._index]
    return norm if dtype is None else norm.to(dtype)


def _foreach_norm(grads: Any, order: float = 2.0, *, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(grad, order, dtype=dtype) for grad in grads]


def _foreach_mul(grads: Any, factor: Any) -> None:
    for index, grad in enumerate(grads):
        grad.mul_(factor[index] if isinstance(factor, (list, tuple)) else factor)


def _foreach_zero(grads: Any) -> None:
    for grad in grads:
        grad.zero_()


def _unscale(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """What `GradScaler.unscale_` does to a list of gradients; it hears of an overflow on any rank."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads]  # before any is changed: they are measured together
    is_lost = ~torch.isfinite(torch.stack(norms)).all()
    found_inf.copy_(torch.maximum(found_inf, is_lost.to(found_inf)))
    _foreach_mul(grads, inv_scale)


_LISTS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": _foreach_norm,
    "_foreach_mul_": _foreach_mul,
    "_foreach_zero_": _foreach_zero,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}


def _open_all(arguments: Any) -> tuple[list[tuple[ManagedGrad, torch.Tensor]], Any]:
    values: list[tuple[ManagedGrad, torch.Tensor]] = []

    def open_one(grad: ManagedGrad) -> torch.Tensor:
        values.append((grad, grad.open()))
        return values[-1][1]

    return values, pytree.tree_map_only(ManagedGrad, open_one, arguments)
