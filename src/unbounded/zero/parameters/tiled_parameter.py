"""The weight of a tiled layer as the user knows it: one parameter with its name, shape and place in the optimizer.

Its values are those of its tiles. Reading joins them; writes go to the tiles, which keep them as any sharded parameter
does; its gradient is made of the tiles' gradients. It refuses what tiles refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.zero.gradients.managed_grad import _LISTS, ManagedGrad, _norm_order
from unbounded.zero.parameters.followed_view import FollowedView, call_counted, end_views, follow, hold, version_of
from unbounded.zero.parameters.parameter import (
    ManagedParameter,
    ShownParameter,
    answer_as_leaf,
    name_of,
    set_requires_grad,
)
from unbounded.zero.placeholder import Placeholder, describe, stand_in


class Rows(Protocol):
    """What a tiled parameter is made of."""

    bounds: list[tuple[int, int]]

    @property
    def tiles(self) -> Sequence[Any]: ...


class TiledParameter(Placeholder, nn.Parameter):
    """See the module's docstring. Made from a Parameter by `adopt`."""

    _tiled: Rows

    @staticmethod
    def adopt(parameter: nn.Parameter, tiled: Rows, dtype: torch.dtype, device: torch.device) -> None:
        """Makes `parameter`, which stays the same object, stand for its tiles."""
        parameter.grad = None
        value = stand_in(parameter.shape, dtype, device)
        if parameter.is_meta:  # a tensor cannot take data of a real device while it is on meta
            torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        else:
            parameter.data = value
        parameter.__class__ = TiledParameter
        parameter._tiled = tiled  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (answer := describe(func, args, kwargs)) is not NotImplemented:
            return answer
        if (answer := answer_as_leaf(cls, func, args, kwargs)) is not NotImplemented:
            return answer
        owner = args[0] if args and isinstance(args[0], TiledParameter) else None
        if owner is not None and getattr(func, "__name__", "") == "detach":
            values = [part.detach() for part in owner._parts()]
            whole = torch.cat(values)
            # A state dict gets plain tensors of its own.
            is_followed = any(isinstance(value, FollowedView) for value in values)
            is_shown = any(isinstance(part, ShownParameter) for part in owner._parts())
            return follow(whole, [(owner, whole)]) if is_followed or is_shown else whole
        lent: dict[TiledParameter, tuple[torch.Tensor, int, Any]] = {}

        def lend(parameter: TiledParameter) -> torch.Tensor:
            if parameter not in lent:
                whole = parameter.current()
                lent[parameter] = whole, whole._version, whole.grad_fn
            return lent[parameter][0]

        args, kwargs = pytree.tree_map_only(TiledParameter, lend, (args, kwargs))
        result = call_counted(func, args, kwargs, [whole for whole, *_ in lent.values()])
        for parameter, (whole, version, node) in lent.items():
            if whole._version != version:
                with torch.set_grad_enabled(whole.grad_fn is not node):  # not where it was written without gradients
                    parameter.keep(whole, getattr(func, "__name__", "this"))
                if result is whole:
                    return parameter
        return follow(result, [(parameter, whole) for parameter, (whole, *_) in lent.items()])

    @property
    def name(self) -> str:  # type: ignore[override]
        """The full name in the model."""
        return name_of(self._parts()[0])

    def _parts(self) -> list[nn.Parameter]:
        return [tile.weight for tile in self._tiled.tiles]

    def current(self) -> torch.Tensor:
        """A copy of the whole."""
        is_wanted = self.requires_grad and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_wanted):  # writes to it must be counted
            return torch.cat([part.mul(1) if is_wanted else part.detach() for part in self._parts()])

    def turn(self) -> AbstractContextManager[None]:
        """Its values are joined into a copy, to which no other thread writes."""
        return nullcontext()

    def holds_its_value(self) -> bool:
        return False

    def changes(self) -> list[tuple[int, int, int]]:
        """How often each tile has changed: as its unit counts, and inside `full_params` as autograd does."""
        units = [(part._unit_ref(), part) for part in self._parts()]  # type: ignore[attr-defined]
        return [(unit.generation, unit.num_writes, version_of(part)) for unit, part in units]

    def make_way(self) -> None:
        """Views of it are of a copy."""

    def keep(self, whole: torch.Tensor, name: str) -> None:
        """Gives every tile its rows of what was written."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        with torch.no_grad():
            for (start, stop), part in zip(self._tiled.bounds, self._parts(), strict=True):
                part.copy_(whole[start:stop])

    def _train(self, is_trained: bool) -> TiledParameter:
        for part in self._parts():
            part.requires_grad_(is_trained)
        set_requires_grad(self, is_trained)
        return self

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradients of the tiles as one; None if none has one."""
        grads = [part.grad for part in self._parts()]
        if any(grad is None for grad in grads):  # a pass uses all tiles of a layer
            return None
        return TiledGrad.of(self.shape, grads)  # type: ignore[arg-type]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        for (start, stop), part in zip(self._tiled.bounds, self._parts(), strict=True):
            part.grad = None if value is None else value[start:stop]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same tiles without gradients; writes reach them."""
        view = nn.Parameter(stand_in(self.shape, self.dtype, self.device), False)
        view.__class__ = TiledParameter
        view._tiled = self._tiled  # type: ignore[attr-defined]
        hold(self, view)
        return view

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise StateError(
                f"a tiled weight is sharded as {tuple(self.shape)} of {self.dtype} and cannot become "
                f"{tuple(value.shape)} of {value.dtype}. Cast or resize the model before `shard`."
            )
        if isinstance(value, TiledParameter) and value._tiled is self._tiled:
            return
        end_views(self, self.current)
        self._keep_data(value)

    def _keep_data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.keep(value, "data")

    def set_(self, *source: Any) -> TiledParameter:  # type: ignore[override]
        return ManagedParameter.set_(self, *source)  # type: ignore[arg-type,return-value]

    def register_hook(self, hook: Callable[..., Any]) -> Any:  # type: ignore[override]
        refuse_hooks("a tiled weight")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:  # type: ignore[override]
        refuse_hooks("a tiled weight")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, in {len(self._tiled.tiles)} tiles)"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = nn.Parameter(self.current(), requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "a tiled weight is sharded and cannot be pickled. Use `unbounded.save` or `model.state_dict()`."
        )


def parts_of(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tiles of a tiled parameter, otherwise the parameter itself."""
    return parameter._parts() if isinstance(parameter, TiledParameter) else [parameter]


def refuse_hooks(name: str) -> None:
    raise StateError(
        f"{name} has a gradient hook, but its gradient comes in parts, of which no one is the whole that the hook "
        "expects. Hook the layer's output, or leave the layer untiled."
    )


class TiledGrad(ManagedGrad):
    """The gradient of a tiled weight: measured and scaled part by part, joined when somebody reads it."""

    _parts: list[torch.Tensor]

    @staticmethod
    def of(shape: torch.Size, parts: list[torch.Tensor]) -> TiledGrad:
        filler = stand_in(shape, parts[0].dtype, parts[0].device)
        grad = torch.Tensor._make_subclass(TiledGrad, filler)
        grad._parts = parts
        return grad

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            for part, rows in zip(self._parts, value.split([len(part) for part in self._parts]), strict=True):
                part.data = rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, name = args[0] if args else None, getattr(func, "__name__", "")
        if (answer := describe(func, args, kwargs)) is not NotImplemented:
            return answer
        if isinstance(first, (list, tuple)) and name in _LISTS:
            return _LISTS[name](*args, **kwargs)
        if isinstance(first, TiledGrad) and (done := first._answer_by_parts(func, args, kwargs)) is not None:
            return done
        opened: dict[TiledGrad, tuple[torch.Tensor, int]] = {}

        def join(grad: TiledGrad) -> torch.Tensor:
            whole = grad.current()
            opened[grad] = whole, whole._version
            return whole

        args, kwargs = pytree.tree_map_only(TiledGrad, join, (args, kwargs))
        result = call_counted(func, args, kwargs, [whole for whole, _ in opened.values()])
        for grad, (whole, version) in opened.items():
            if whole._version != version:
                grad.keep(whole, name)
        return follow(result, [(grad, whole) for grad, (whole, _) in opened.items()])

    def _answer_by_parts(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What can be done where the parts are: clearing, multiplying by a number, measuring. Otherwise None."""
        name = getattr(func, "__name__", "")
        if name in ("zero_", "mul_", "div_", "__imul__", "__itruediv__"):
            for part in self._parts:
                func(part, *args[1:], **kwargs)
            return self
        if _norm_order(name, args, kwargs) == 2.0:
            return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in self._parts]))
        return None

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def changes(self) -> None:
        """A copy of a gradient does not change."""

    def current(self) -> torch.Tensor:
        return self.open()

    def open(self) -> torch.Tensor:
        """A copy: what is written to it would be lost."""
        with torch.inference_mode(False), torch.no_grad():  # writes to it must be counted
            return torch.cat([part.detach() for part in self._parts])

    def make_way(self) -> None:
        """Views of it are of a copy."""

    def keep(self, whole: torch.Tensor, name: str) -> None:
        raise StateError(
            f"{name}() would write to a copy of the gradient of a tiled weight, and be lost. Multiply or clear the "
            "gradient itself (grad.mul_(2), grad.zero_()), give another one (weight.grad = ...), or leave the "
            "layer untiled."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.current())
