"""When things happen: the hooks on sites that tell the engine where a forward is.

The engine attaches two hooks per site for passes. Every module also has one that refuses a load which would replace the
trained parameters. A block compiled with `module.compile()` before `shard`
gets its two calls around the compiled code instead of inside it, where each would break the graph. In copies of a
module the hooks do nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.hooks import RemovableHandle

from unbounded.calls import called_from
from unbounded.errors import StateError
from unbounded.own_hook import OwnHook
from unbounded.zero.passes.inputs import Inputs, ParameterValues

_MAX_ANNOUNCED = 8

# Where a whole training step is compiled, its backward and its `step` come here: these are not for the compiler.
for _package in ("native", "optim", "ranks", "tiers", "zero"):
    torch._dynamo.trace_rules.add(f"unbounded.{_package}")


class Visitor(Protocol):
    """The engine as the hooks see it; a site is known by its index."""

    inputs: Inputs

    def before_forward(self, index: int) -> None: ...

    def after_forward(self, index: int, outputs: Any, *, are_hooks_left: bool) -> None: ...


class _Hook(OwnHook):
    """A hook of the engine. It is not for the compiler."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(torch._dynamo.disable(call))

    @property
    def __name__(self) -> str:
        if called_from(torch.jit.script):  # the first attribute that it asks a hook for
            raise StateError(
                "a sharded model cannot be scripted: its weights come and go. Do it with a plain copy: "
                "copy.deepcopy(model), or unbounded.unshard(model)."
            )
        return "hook"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "this model is sharded and cannot be pickled whole. Use `unbounded.save`, `unbounded.export` or "
            "`torch.save(model.state_dict(), path)`."
        )


def attach(module: nn.Module, site: int, visitor: Visitor, *, is_root: bool) -> Callable[[], None]:
    """Attaches the hooks of one site; the returned function detaches them."""
    if module._compiled_call_impl is not None:
        return _attach_around(module, site, visitor, is_root=is_root)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        visitor.before_forward(site)
        return visitor.inputs.adapt(args, kwargs) if is_root else None

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        if is_root:
            visitor.inputs.restore()
        visitor.after_forward(site, outputs, are_hooks_left=len(module._forward_hooks) > 1)

    handles = [
        module.register_forward_pre_hook(_Hook(before), prepend=True, with_kwargs=True),
        module.register_forward_hook(_Hook(after), always_call=True),
    ]
    return partial(_remove, handles)


def guard_loads(model: nn.Module, begin: Callable[[], None]) -> Callable[[], None]:
    """Calls `begin` before `load_state_dict` of any module, or refuses `assign=True`; the result undoes it."""

    def before(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise StateError(
                "load_state_dict(assign=True) would put new parameters in place of those that are sharded, which the "
                "optimizer trains. Leave out `assign`: the values are then copied to where the plan keeps them."
            )
        if not prefix:  # the module that it was called of
            begin()

    handles = [module.register_load_state_dict_pre_hook(_Hook(before)) for module in model.modules()]
    return partial(_remove, handles)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _attach_around(module: nn.Module, site: int, visitor: Visitor, *, is_root: bool) -> Callable[[], None]:
    compiled, reference = module._compiled_call_impl, weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs, values = None, ParameterValues()
        try:
            visitor.before_forward(site)
            if is_root:
                args, kwargs = visitor.inputs.adapt(args, kwargs)
            args, kwargs = values.adapt(args, kwargs)
            outputs = compiled(*args, **kwargs)  # type: ignore[misc]
        finally:
            values.restore()
            if is_root:
                visitor.inputs.restore()
            visitor.after_forward(site, outputs, are_hooks_left=False)
        return outputs

    call.compiled = compiled  # type: ignore[attr-defined]
    module._compiled_call_impl = call  # type: ignore[assignment]

    def detach() -> None:  # whoever keeps this must not keep the model alive, as the compiled code would
        if (held := reference()) is not None:
            held._compiled_call_impl = held._compiled_call_impl.compiled  # type: ignore[union-attr]

    return detach


def announce(outputs: Any, begin: Callable[[], None]) -> None:
    """Makes the first gradient of the model's output call `begin`, so that weights are fetched early.

    It looks only at the first few tensors. A backward that begins elsewhere fetches its first weights when it reads
    them.
    """
    for tensor in islice(_shallow(outputs), _MAX_ANNOUNCED):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(lambda _: begin())


def _shallow(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        yield from (item for item in islice(items, _MAX_ANNOUNCED) if isinstance(item, torch.Tensor))


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward seen then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_module_call() -> bool:
    """Whether this thread is inside the call of some module."""
    return called_from(nn.Module._call_impl)


def in_recomputation() -> bool:
    """Whether a checkpoint of torch runs modules again in the backward that is running. Walks the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not vars(torch.autograd.graph):  # which runs every backward
        if frame.f_globals is vars(torch.utils.checkpoint):
            return True
        frame = frame.f_back
    return False
