"""Logits that do not exist yet: a tensor with a shape, made when somebody looks at it.

A model's head returns one in a forward that was given labels. What losses do on their way (casts, scales, caps, views
that keep rows whole, slices of rows) gives another one; `cross_entropy` of one is the tiled loss. Everything else makes
the logits as the model would have made them and continues with those, so results are always those of the model. If
gradients are needed, logits are made in the graph and then kept. A write to logits, or a wish for their gradient, must
reach everything that was derived from them, so all of that is made first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unbounded.activations.tiled.logits_recipe import (
    ELEMENTWISE,
    Application,
    LogitsRecipe,
    Product,
    map_inputs,
    products_of,
)
from unbounded.deferred_tensor import METADATA, DeferredTensor, make_all
from unbounded.errors import StateError
from unbounded.own_hook import is_own

# Takes a recipe of (rows, classes), labels and the arguments of cross_entropy; None if it wants to see logits.
Loss = Callable[[LogitsRecipe, torch.Tensor, Mapping[str, Any]], torch.Tensor | None]


class LogitsFamily:
    """The logits of one product, or of several that were added up, and all that was derived from them."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Deferred]] = []  # in the order in which they came
        self.has_loss = False  # one was computed without their values

    def add(self, member: Deferred) -> None:
        self._members.append(weakref.ref(member))
        member._family = self

    def take_in(self, other: LogitsFamily) -> None:
        """From now on the members of another family are of this one."""
        for member in other.members() if other is not self else ():
            self.add(member)
        self.has_loss |= other.has_loss

    def members(self) -> list[Deferred]:
        return [member for reference in self._members if (member := reference()) is not None]

    def settle(self) -> None:
        """Makes all of them, in the graph."""
        with torch.enable_grad():
            for member in self.members():
                member.make()

    def show_gradient(self) -> None:
        """Somebody asks for the gradient of a member: every loss must then come from its values."""
        if self.has_loss:
            raise StateError(
                "the loss of this forward was computed without its logits, so it has no gradient for them. Leave out "
                "labels, and compute the loss from output.logits."
            )
        self.settle()


class Deferred(DeferredTensor):
    """See the module's docstring. `source` makes the values, `loss` is what cross_entropy becomes."""

    _family: LogitsFamily
    _recipe: LogitsRecipe
    _source: Callable[[], torch.Tensor]
    _loss: Loss
    _made: torch.Tensor | None
    _seen: torch.Tensor | None
    _hooks: list[Callable[..., Any]]

    @staticmethod
    def __new__(  # type: ignore[misc]
        cls: type[Deferred], like: torch.Tensor, recipe: LogitsRecipe, source: Callable[[], torch.Tensor], loss: Loss
    ) -> Deferred:
        inputs = next(products_of(recipe)).inputs
        deferred = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=inputs.device, requires_grad=like.requires_grad
        )
        deferred._recipe, deferred._source, deferred._loss = recipe, source, loss
        deferred._made = deferred._seen = None
        deferred._hooks = []
        return deferred

    def make(self) -> torch.Tensor:
        """The logits. A look without a graph, as metrics have, leaves no trace in the graph."""
        if self._made is not None:
            return self._made
        if self.requires_grad and not torch.is_grad_enabled():
            if self._seen is None or self._seen.is_inference() != torch.is_inference_mode_enabled():
                self._seen = self._source()
            return self._seen
        with torch.set_grad_enabled(self.requires_grad):
            self._made, self._seen = self._source(), None
        for hook in self._hooks:
            self._made.register_hook(hook)
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        name, owner = getattr(func, "__name__", ""), args[0] if args and isinstance(args[0], Deferred) else None
        if owner is not None and (_writes_in_place(name) or func == _DATA):
            owner._family.settle()
        for asked in _asked_for_gradient(func, args, kwargs):
            asked._family.show_gradient()
        if owner is not None and owner._made is None:
            if func in _ANSWERS:
                return _ANSWERS[func](owner, *args[1:], **kwargs)
            if name in ELEMENTWISE or name in _SAME_ROWS:
                derived = _derive(owner, func, args, kwargs)
                if derived is not None:
                    return derived
        if func is torch.nn.functional.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        return super().__torch_function__(func, types, args, kwargs)


def _writes_in_place(name: str) -> bool:
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _asked_for_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> list[Deferred]:
    """The deferred logits whose gradient a user asks for. Our own hooks on them only watch for a backward to come."""
    given = (*args, *kwargs.values())
    wanted: Any = ()
    if func is torch.autograd.grad:
        wanted = kwargs["inputs"] if "inputs" in kwargs else args[1]
    elif func is torch.Tensor.retain_grad or (func is torch.Tensor.register_hook and not is_own(given[1])):
        wanted = given[0]
    return [value for value in pytree.tree_leaves(wanted) if isinstance(value, Deferred)]


def _register_hook(owner: Deferred, hook: Callable[..., Any]) -> Any:
    """Keeps a hook for when the logits are made; if they never are, no gradient comes to them."""
    owner._hooks.append(hook)
    return _Removable(owner._hooks, hook)


class _Removable:
    def __init__(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


# What engines ask of every output of a module, answered without making the logits.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.untyped_storage: lambda owner: torch.UntypedStorage(0),
    torch.Tensor.is_leaf.__get__: lambda owner: not owner.requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: lambda owner: next(products_of(owner._recipe)).inputs.grad_fn,  # type: ignore[union-attr]
    torch.Tensor.is_inference: lambda owner: False,
}
_SAME_ROWS = frozenset({"view", "reshape", "flatten", "contiguous", "__getitem__", "clone"})


def _derive(owner: Deferred, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Deferred | None:
    """What `func` gives without the values: the same for every element, or other rows. None if it is neither."""
    like = _result_like(owner, func, args, kwargs)
    if like is None or like.shape[-1:] != owner.shape[-1:]:
        return None
    name = func.__name__
    recipe = (
        _with_step(owner, func, args, kwargs) if name in ELEMENTWISE else _with_rows(owner, name, args[1:], like.shape)
    )
    if recipe is None:
        return None
    derived = Deferred(like, recipe, lambda: func(*make_all(args), **make_all(kwargs)), owner._loss)
    for other in args:
        if isinstance(other, Deferred):
            owner._family.take_in(other._family)
    owner._family.add(derived)
    return derived


def _result_like(owner: Deferred, func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor | None:
    """Shape and dtype of the result, from a run on the meta device. None if it fails or moves."""

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if tensor.dim() else tensor.detach()

    if func.__name__ == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not _keeps_rows_whole(index, owner.dim()):
            return None
        rows = next(products_of(owner._recipe)).inputs[args[1]]
        shape = (*rows.shape[:-1], owner.shape[-1])
        like = torch.empty(shape, dtype=owner.dtype, device="meta")
        has_graph = owner.requires_grad
    else:
        if any(isinstance(value, torch.device) or value in ("cpu", "cuda") for value in _plain_values(args, kwargs)):
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        has_graph = any(isinstance(value, torch.Tensor) and value.requires_grad for value in leaves)
        try:
            args, kwargs = pytree.tree_map_only(torch.Tensor, to_meta, (args, kwargs))
            like = func(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        if not isinstance(like, torch.Tensor):
            return None
    return like.detach().requires_grad_(torch.is_grad_enabled() and has_graph and like.is_floating_point())


def _plain_values(args: Any, kwargs: Any) -> list[Any]:
    return [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, (torch.device, str))]


def _with_step(owner: Deferred, func: Callable[..., Any], args: Any, kwargs: Any) -> LogitsRecipe | None:
    operands: list[Any] = []
    for value in args:
        if isinstance(value, Deferred):
            if value.shape != owner.shape or value._made is not None:
                return None
            operands.append(value._recipe)
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1:
                operands.append(value.reshape(()))
            elif value.dim() and value.numel() == value.shape[-1] == owner.shape[-1]:
                operands.append(value.reshape(-1))
            else:
                return None
        else:
            operands.append(value)
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return None
    return Application(func, tuple(operands), kwargs)


def _with_rows(owner: Deferred, name: str, rest: tuple[Any, ...], shape: torch.Size) -> LogitsRecipe | None:
    if name in ("contiguous", "clone"):
        return owner._recipe
    if name == "__getitem__":
        return map_inputs(owner._recipe, lambda inputs: inputs[rest[0]])
    return map_inputs(owner._recipe, lambda inputs: inputs.reshape(*shape[:-1], inputs.shape[-1]))


def _keeps_rows_whole(index: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index takes rows as they are: slices, numbers and tensors before the last dim, nothing in it."""
    taken = 0
    for part in index:
        if isinstance(part, torch.Tensor) and not isinstance(part, Deferred):
            taken += part.dim() if part.dtype == torch.bool else 1
        elif isinstance(part, (slice, int)) and not isinstance(part, bool):
            taken += 1
        elif part is not Ellipsis:
            return False
    if taken < num_dims and Ellipsis not in [part for part in index if not isinstance(part, torch.Tensor)]:
        return True
    return isinstance(index[-1], slice) and index[-1] == slice(None)


def _cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """`torch.nn.functional.cross_entropy` of deferred logits, tiled; None if it cannot be tiled."""
    is_plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    is_deferred = isinstance(input, Deferred) and input._made is None and input.dim() == 2
    if not (is_plain and is_deferred) or isinstance(target, Deferred):
        return None
    if target.dim() != 1 or target.dtype not in (torch.long, torch.uint8) or target.shape[0] != input.shape[0]:
        return None
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = input._loss(input._recipe, target.long(), options)
    if loss is None:
        return None
    input._family.has_loss = True
    return loss.to(input.dtype)


def defer(product: Product, like: torch.Tensor, source: Callable[[], torch.Tensor], loss: Loss) -> Deferred:
    """Deferred logits of a product; `like` has their shape and dtype."""
    deferred = Deferred(like, product, source, loss)
    LogitsFamily().add(deferred)
    return deferred
