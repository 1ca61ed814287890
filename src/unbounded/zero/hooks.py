"""When things happen: the hooks on sites that tell the engine where a pass is. They are all that is attached.

Two hooks a site, and one tensor hook on what a site returns or keeps, which marks the start of its backward. A block
compiled with `module.compile()` before `shard` gets its two calls around the compiled code instead of inside
it, where each would break the graph.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Visitor(Protocol):
    """The engine as the hooks see it; a site is known by its index."""

    def before_forward(self, site: int) -> None: ...

    def after_forward(self, site: int, outputs: Any, kept: Any) -> None: ...

    def adapt_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...


def attach(module: nn.Module, site: int, visitor: Visitor, *, is_root: bool) -> Callable[[], None]:
    """Attaches the hooks of one site; the returned function detaches them."""
    if module._compiled_call_impl is not None:
        return _attach_around(module, site, visitor, is_root=is_root)

    kept = _Kept()

    @torch._dynamo.disable
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        visitor.before_forward(site)
        return visitor.adapt_inputs(args, kwargs) if is_root else None

    @torch._dynamo.disable
    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        visitor.after_forward(site, outputs, kept.find(module))

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def _attach_around(module: nn.Module, site: int, visitor: Visitor, *, is_root: bool) -> Callable[[], None]:
    compiled, reference = module._compiled_call_impl, weakref.ref(module)
    kept = _Kept()

    def call(*args: Any, **kwargs: Any) -> Any:
        visitor.before_forward(site)
        if is_root:
            args, kwargs = visitor.adapt_inputs(args, kwargs)
        outputs = None
        try:
            outputs = compiled(*args, **kwargs)  # type: ignore[misc]
        finally:
            visitor.after_forward(site, outputs, kept.find(reference()))
        return outputs

    call.compiled = compiled  # type: ignore[attr-defined]
    module._compiled_call_impl = call  # type: ignore[assignment]

    def detach() -> None:  # whoever keeps this must not keep the model, which the compiled code does
        if (held := reference()) is not None:
            held._compiled_call_impl = held._compiled_call_impl.compiled  # type: ignore[union-attr]

    return detach


class _Kept:
    """Tensors of the graph that the modules of a site keep on themselves, such as an auxiliary loss for later.

    Which attributes hold any is found in the first forward that has a graph, and only looked up in the others.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] | None = None

    def find(self, module: nn.Module | None) -> list[Any]:
        if module is None or not torch.is_grad_enabled() or in_backward():
            return []
        if self._places is None:
            self._places = [
                (part, name)
                for part in module.modules()
                for name, value in vars(part).items()
                if name not in _OF_MODULES and _has_graph(value)
            ]
        return [vars(part).get(name) for part, name in self._places]


_OF_MODULES = frozenset(vars(nn.Module()))


def _has_graph(value: Any) -> bool:
    is_searched = isinstance(value, (torch.Tensor, list, tuple, dict))
    return is_searched and any(tensor.grad_fn is not None for tensor in find_tensors(value, depth=2))


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward seen then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_module_call() -> bool:
    """Whether this thread is inside the call of some module. Walks the stack, so not for the hot path."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def find_tensors(value: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Every tensor inside what a module returned: containers, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is None or isinstance(value, (str, bytes, int, float, complex, torch.dtype, torch.device)) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item, depth - 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None), depth - 1)
    elif not isinstance(value, (type, nn.Module)) and hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from find_tensors(item, depth - 1)
