"""What the user can reach between forwards: the same Parameter objects, managed by their unit.

A managed parameter keeps its identity, name, shape, dtype and place in the optimizer. While its unit is
partitioned or offloaded its data is one element of NaN spread over the true shape, so no tensor over freed
memory exists; every computation on it comes through `__torch_function__`, which puts the gathered value in its
place if that is safe, and otherwise refuses with a remedy. The value's version counter shows whether a computation has
written to it, whatever the operation is called; what was written goes to the tier that keeps the parameter. Inside
forwards the modules hold plain tensors instead, so none of this is on the hot path.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from unbounded.calls import called_from
from unbounded.errors import StateError
from unbounded.zero.gradients.managed_grad import ManagedGrad, grad_of, keep_alive, shown_shape, turn_of
from unbounded.zero.parameters.followed_view import (
    FollowedView,
    call_counted,
    end_views,
    follow,
    hold,
    in_turns,
    shares,
    version_of,
)
from unbounded.zero.placeholder import Placeholder, as_set, describe, stand_in
from unbounded.zero.saved import is_of_unit
from unbounded.zero.unit import Unit

_Tensor = torch.Tensor
_SAVE = "Copy the model before `shard`, or use `unbounded.save`, `unbounded.export` or `model.state_dict()`."
_MOVES = {"to", "cuda", "cpu", "half", "bfloat16", "float", "double", "type"}
_REFUSED = {"__setstate__", "pin_memory", "share_memory_", "resize_", "resize_as_", "retain_grad", "backward"}
_ADDRESSES = {"data_ptr", "untyped_storage", "_typed_storage", "storage"}  # what tells which tensors share memory
_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward}
Hooks = OrderedDict[int, Callable[..., Any]]
_is_there = partial(operator.is_not, None)
_GET_GRAD, _SET_GRAD = _Tensor.grad.__get__, _Tensor.grad.__set__  # type: ignore[union-attr]
_SET_REQUIRES_GRAD = _Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class ManagedParameter(Placeholder, nn.Parameter):
    """A parameter whose value and gradient are kept by its unit. Made from a Parameter by `manage`."""

    _unit_ref: weakref.ref[Unit]
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (answer := describe(func, args, kwargs)) is not NotImplemented:
            return answer
        if (answer := answer_as_leaf(cls, func, args, kwargs)) is not NotImplemented:
            return answer
        name = getattr(func, "__name__", str(func))
        owner = args[0] if args and isinstance(args[0], ManagedParameter) else None
        if owner is not None:
            if name == "detach" and called_from(nn.Module.state_dict):
                return owner._unit.engine.lending.snapshot(owner._unit, owner._index)
            if name in _ADDRESSES and not owner._unit.engine.is_in_pass():
                with torch._C.DisableTorchFunctionSubclass():  # every parameter has its own, which lasts
                    return func(*args, **kwargs)
            if name == "detach" and called_from(nn.Parameter.__new__):
                raise StateError(
                    f"nn.Parameter() was given the sharded parameter {owner.name!r}, whose memory it cannot share. "
                    "Give it a copy: nn.Parameter(parameter.detach().clone())."
                )
            if name == "copy_":
                return owner._overwrite(args[1])
            if name in _MOVES and _changes_nothing(func, owner, args, kwargs):
                return owner
            if name in _MOVES and called_from(nn.Module._apply):
                raise StateError(
                    f"{name}() would move or cast the parameter {owner.name!r}, which is sharded as {owner.dtype} for "
                    f"{owner.device}. Move and cast the model before `shard`; a plan's `precision` chooses the dtype."
                )
        return _compute(func, args, kwargs)

    @property
    def _unit(self) -> Unit:
        unit = self._unit_ref()
        if unit is None:
            raise StateError("the sharded model that this parameter belonged to is gone, and its value with it.")
        return unit

    def _train(self, is_trained: bool) -> ManagedParameter:
        """From the next backward on, takes or ignores the parameter's gradient."""
        unit = self._unit
        unit.engine.train(unit, self._index, is_trained=is_trained)
        set_requires_grad(self, is_trained)
        (unit.views.frozen.discard if is_trained else unit.views.frozen.add)(self._index)
        unit.views.watch()
        return self

    def _overwrite(self, source: Any) -> ManagedParameter:
        """Takes a new value without reading the old one. All ranks load a state dict."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        unit, source = self._unit, source.data if isinstance(source, ManagedParameter) else source
        value = torch.empty(self.shape, dtype=unit.dtype, device=unit.device).copy_(source)
        unit.engine.lending.overwrite(unit, self._index, value, from_all=called_from(nn.Module.load_state_dict))
        return self

    @property
    def name(self) -> str:  # type: ignore[override]
        """The full name in the model."""
        return name_of(self)

    def turn(self) -> AbstractContextManager[None]:
        """Inside, no other thread uses the model."""
        unit = self._unit_ref()
        return nullcontext() if unit is None else turn_of(unit)

    def holds_its_value(self) -> bool:
        """Whether what is at its address is its value, which a look at it brings up to date."""
        if self._unit.resident:
            with torch.no_grad():
                self.current()
        return self._unit.resident

    def changes(self) -> tuple[int, int] | None:
        """How often the weights have changed, also by writes of forwards; None if the model is gone."""
        unit = self._unit_ref()
        return None if unit is None else (unit.generation, unit.num_writes)

    def current(self) -> torch.Tensor:
        """The value, for a computation outside the module's forward."""
        return self._unit.engine.lending.borrow(self._unit, self._index)

    def make_way(self) -> None:
        """Views of a value that stays on the device are of its own memory, which a save may be reading."""
        unit = self._unit_ref()
        if unit is not None and unit.resident:
            unit.make_way()

    def keep(self, value: torch.Tensor, name: str) -> None:
        """Brings a value, to which the operation `name` has written, to where the parameter is kept."""
        self._unit.engine.lending.keep(self._unit, self._index, value)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient; None before there is one. If this rank does not hold it whole, it can only be measured."""
        return grad_of(self._unit, self._index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        put_grad(self._unit, self._index, value)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The value; writes to it are kept."""
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise StateError(
                f"the parameter {self.name!r} is sharded as {tuple(self.shape)} of {self.dtype} on {self.device} and "
                f"cannot become {tuple(value.shape)} of {value.dtype} on {value.device}. Move, cast or resize the "
                "model before `shard`; a plan's `precision` chooses the dtype."
            )
        with torch.no_grad(), self.turn():
            if isinstance(value, FollowedView) and value._source is self and has_memory_of(value, value._memory):
                return
            end_views(self, lambda: self.current().clone())
            self.copy_(value)

    def set_(self, *source: Any) -> ManagedParameter:  # type: ignore[override]
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        self.data = as_set(self, source)
        return self

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        """`hook` is called with this rank's gradient of a backward, before ranks add up theirs, and may replace it."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        unit = self._unit_ref()
        assert unit is not None
        hooks = unit.views.hooks.setdefault(self._index, OrderedDict())
        _call_in_grad(self, hooks)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        refuse_accumulate_hook(name_of(self), "a post-accumulate-grad hook")
        raise AssertionError

    @property
    def _in_backward_optimizers(self) -> Any:
        raise AttributeError("there are no optimizers that step in the backward")  # as long as nobody sets them

    @_in_backward_optimizers.setter
    def _in_backward_optimizers(self, _: Any) -> None:
        refuse_accumulate_hook(name_of(self), "an optimizer that steps in the backward")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, {self._unit.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """All ranks of the axis must call this if the parameter is partitioned. Returns a plain one with the value."""
        if id(self) not in memo:
            value = self._unit.engine.lending.borrow(self._unit, self._index, from_all=True)
            memo[id(self)] = nn.Parameter(value.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(f"the parameter {self.name!r} is sharded and cannot be pickled. {_SAVE}")


class ShownParameter(nn.Parameter):
    """A managed parameter whose own data is its full value for a while."""

    _unit_ref: weakref.ref[Unit]
    _index: int

    turn = ManagedParameter.turn
    register_hook = ManagedParameter.register_hook
    register_post_accumulate_grad_hook = ManagedParameter.register_post_accumulate_grad_hook
    _in_backward_optimizers = ManagedParameter._in_backward_optimizers

    def changes(self) -> object:
        """Whoever writes to a shown value does not say so."""
        return object()

    def current(self) -> torch.Tensor:
        return self.detach()

    def make_way(self) -> None:
        """Whoever shows values has waited."""

    def keep(self, value: torch.Tensor, name: str) -> None:
        self.detach().copy_(value)

    def detach(self) -> torch.Tensor:  # type: ignore[override]
        value = super().detach()
        hold(self, value)
        return value

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if has_memory_of(value, self):
            return
        unit = self._unit_ref()
        if unit is not None and shares(self, unit.buffer):  # which takes the new value in the end
            end_views(self, self.clone)
        vars(self).pop("_held", None)
        set_data(self, value.detach().clone() if isinstance(value, FollowedView) or is_of_unit(value) else value)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        return grad_of(self._unit_ref(), self._index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        unit = self._unit_ref()
        assert unit is not None
        put_grad(unit, self._index, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), requires_grad=self.requires_grad).__reduce_ex__(protocol)


def manage(parameter: nn.Parameter, unit: Unit, index: int) -> ManagedParameter:
    """Turns `parameter` into a managed one, keeping the object."""
    parameter.grad = None
    if parameter.is_meta:  # a tensor cannot take data of a real device while it is on meta
        value = stand_in(parameter.shape, parameter.dtype, unit.device)
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    parameter.__class__ = ManagedParameter
    assert isinstance(parameter, ManagedParameter)
    parameter._unit_ref, parameter._index = weakref.ref(unit), index
    return parameter


def take_hooks(parameter: nn.Parameter) -> Hooks | None:
    """Takes the users' hooks from autograd, which from now on sees the parameter's gradient in `autograd.grad` only."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks: Hooks | None = parameter._backward_hooks  # type: ignore[assignment]
    if hooks:
        _call_in_grad(parameter, hooks)
    return hooks


def _call_in_grad(parameter: nn.Parameter, hooks: Hooks) -> None:
    """Has autograd call users' hooks where it hands out a gradient itself. In a backward it has none: the unit does."""

    def call(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else call_hooks(hooks, gradient)

    with torch._C.DisableTorchFunctionSubclass():
        parameter._backward_hooks = OrderedDict({0: call})


def call_hooks(hooks: Hooks, gradient: torch.Tensor) -> torch.Tensor:
    """What hooks make of the gradient that they are called with one after another."""
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def refuse_accumulate_hook(name: str, what: str) -> None:
    raise StateError(
        f"the parameter {name!r} has {what}, but its gradient is reduced and offloaded in the background, so there is "
        "no moment at which that could see it. Use `with optimizer.last_backward():` to update parameters inside the "
        "backward, and register_hook to change gradients."
    )


def refuse_replaced(name: str) -> None:
    raise StateError(
        f"the parameter {name!r} was replaced or removed after `shard`, so the engine would train one that the model "
        "no longer has. Change the model before `shard`, write values inside `with unbounded.full_params(model):`, and "
        "run torch.func.functional_call on copy.deepcopy(model)."
    )


def unmanage(parameter: ManagedParameter | ShownParameter, value: torch.Tensor) -> nn.Parameter:
    """Turns a managed parameter back into a plain one that holds `value`."""
    end_views(parameter, lambda: value)
    unit = parameter._unit_ref()
    hooks = unit.views.hooks.get(parameter._index) if unit is not None else None
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    del parameter._unit_ref, parameter._index
    parameter.data, parameter._backward_hooks = value, hooks
    return parameter


def show(parameter: ManagedParameter, value: torch.Tensor) -> None:
    """Makes `value` the parameter's own data, without anything of this module in between."""
    set_data(parameter, value)
    parameter.__class__ = ShownParameter  # type: ignore[assignment]


def hide(parameter: ManagedParameter | ShownParameter) -> None:
    """Puts the engine in between again."""
    parameter.__class__ = ManagedParameter


def name_of(parameter: Any) -> str:
    """The full name of a managed or shown parameter; of a tile, that of the whole."""
    unit: Unit = ManagedParameter._unit.fget(parameter)  # type: ignore[attr-defined]
    return unit.layout.slots[parameter._index].name


def answer_as_leaf(cls: type[Any], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a parameter of class `cls` answers as a leaf of autograd, or refuses; NotImplemented for computations."""
    if func in _AUTOGRAD:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    owner: Any = args[0] if args else None
    if not isinstance(owner, cls):
        return NotImplemented
    name = getattr(func, "__name__", str(func))
    if name == "requires_grad_" or func == _SET_REQUIRES_GRAD:
        return owner._train(bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
    if name in _REFUSED or name == "__set__":
        raise StateError(f"{name.strip('_')}() cannot be done to the sharded parameter {owner.name!r}. {_SAVE}")
    if (
        name in _ADDRESSES
        and called_from(safetensors.torch.save, safetensors.torch.save_file)
        and not owner.holds_its_value()
    ):
        raise StateError(
            f"safetensors was given the sharded parameter {owner.name!r}, whose value is not at its address. "
            "Give it parameter.detach().clone(), or use `unbounded.export` or `model.state_dict()`."
        )
    if name == "view_as" and called_from(torch.autograd.graph._get_grad_fn_or_grad_acc):
        return _view_leaf(owner, args[1])
    if name == "expand_as" and args[1] is owner and owner.requires_grad and torch.is_grad_enabled():
        raise StateError(
            f"the sharded parameter {owner.name!r} was expanded as itself, which is done to find autograd's node. Its "
            "gradient goes to its unit, so hooks on that node would never be called. Use register_hook on the "
            "parameter; for its value, parameter.view_as(parameter)."
        )
    return NotImplemented


def _view_leaf(parameter: Any, other: torch.Tensor) -> torch.Tensor:
    """A view through which torch finds the parameter's node, which `torch.autograd.grad` takes for it."""
    if called_from(torch.autograd.graph.register_multi_grad_hook):
        raise StateError(
            f"register_multi_grad_hook was given the sharded parameter {parameter.name!r}, whose gradient goes to its "
            "unit and not through autograd's node, so the hook would never be called. Use register_hook on each."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.view_as(other)  # type: ignore[no-any-return]


def set_requires_grad(parameter: nn.Parameter, is_trained: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _SET_REQUIRES_GRAD(parameter, is_trained)


def take_stray_gradients(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The parameters to which autograd has given gradients directly, bypassing the engine; these are removed."""
    with torch._C.DisableTorchFunctionSubclass():
        if not any(map(_is_there, map(_GET_GRAD, parameters))):  # a loop in C: this runs in every backward
            return []
        found = [index for index, parameter in enumerate(parameters) if _GET_GRAD(parameter) is not None]
        for index in found:
            _SET_GRAD(parameters[index], None)
    return found


def has_memory_of(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both show the same elements of one memory."""
    with torch._C.DisableTorchFunctionSubclass():
        same = value.dtype == other.dtype and value.shape == other.shape and value.stride() == other.stride()
        return same and shares(value, other) and bool(value.storage_offset() == other.storage_offset())


def set_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


def put_grad(unit: Unit, index: int, value: torch.Tensor | None) -> None:
    """`p.grad = value` for one parameter."""
    with turn_of(unit):
        _put_grad(unit, index, value)


def _put_grad(unit: Unit, index: int, value: torch.Tensor | None) -> None:
    gradient = unit.gradient
    if isinstance(value, ManagedGrad) and value is grad_of(unit, index):
        return
    keep_alive(gradient, [index])
    if value is None:
        gradient.drop_slot(index)
        return
    slot = gradient.layout.slots[index]
    if unit.engine.is_shown and (not gradient.is_whole or gradient.local is not None):
        unit.engine.gradients.lend(unit)
    if not unit.trainable or gradient.local is not None or not (gradient.is_whole or unit.engine.is_shown):
        raise StateError(
            f"the gradient of {slot.name!r} is not held whole by this rank (partitioned, frozen, or not reduced yet), "
            "so it cannot be replaced here. Do it inside `with unbounded.full_params(model):` on every rank, or "
            "register a hook on the parameter."
        )
    shape = shown_shape(unit, index)
    if tuple(value.shape) != shape:
        raise RuntimeError(f"the gradient of {slot.name!r} must be {shape}, but has shape {tuple(value.shape)}.")
    gradient.order_stream()
    gradient.put_slot(index, value.detach())


def _compute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `func` on the values of parameters, and keeps what it has written to them."""
    parameters: list[ManagedParameter] = []
    pytree.tree_map_only(ManagedParameter, parameters.append, (args, kwargs))
    with in_turns(parameters):
        return _compute_with_values(func, args, kwargs)


def _compute_with_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    lent: dict[ManagedParameter, tuple[torch.Tensor, int]] = {}

    def lend(parameter: ManagedParameter) -> torch.Tensor:
        if parameter not in lent:
            value = parameter.current()
            lent[parameter] = (value, version_of(value))
        return lent[parameter][0]

    args, kwargs = pytree.tree_map_only(ManagedParameter, lend, (args, kwargs))
    try:
        result = call_counted(func, args, kwargs, [value for value, _ in lent.values()])
    except RuntimeError as error:
        if lent and "modified inplace" in str(error):  # for what the engine has lent, in plain PyTorch's own words
            message = "a leaf Variable that requires grad is being used in an in-place operation."
            raise RuntimeError(message) from error
        raise
    for parameter, (value, version) in lent.items():
        if version_of(value) != version:
            parameter.keep(value, getattr(func, "__name__", "this"))
            if result is value:
                return parameter
    return follow(result, [(one, value) for one, (value, _) in lent.items() if not _is_of_pass(one, value)])


def _is_of_pass(parameter: ManagedParameter, value: torch.Tensor) -> bool:
    """Whether `value` is a part of the graph of a running forward, which is itself watched for writes."""
    return value.requires_grad and parameter._unit.engine.is_in_pass()


def _changes_nothing(func: Callable[..., Any], owner: ManagedParameter, args: Any, kwargs: Any) -> bool:
    """Whether a move or cast would give the parameter itself, tried on an empty tensor like it."""
    like = torch.empty(0, dtype=owner.dtype, device=owner.device)
    rest = pytree.tree_map_only(ManagedParameter, lambda p: torch.empty(0, dtype=p.dtype, device=p.device), args[1:])
    try:
        return func(like, *rest, **kwargs) is like
    except (RuntimeError, TypeError):
        return False
