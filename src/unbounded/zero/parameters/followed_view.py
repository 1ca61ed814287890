"""Views of a parameter's value, or of a tiled gradient, that users hold outside forwards.

The memory is that of the value itself or, if the value is kept elsewhere, of a copy. After a change of the weights, a
copy is brought up to date before it is used, and writes to it go to where the value is kept. The version counter shows
whether an operation has written, whatever the operation is called. Views end where the value gets other memory
(`p.data = x`): they keep what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from unbounded.errors import StateError
from unbounded.zero.placeholder import METADATA, Placeholder, meets_placeholder

# Backwards may run in other threads, and a base that is asked for would be a view of itself.
_UNFOLLOWED = {
    *(torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward),
    torch.Tensor._base.__get__,  # type: ignore[union-attr]
}


class Source(Protocol):
    """Whose value the memory holds."""

    def changes(self) -> Any:
        """A mark of the present value, which differs after a change; None if it can no longer change."""

    def make_way(self) -> None:
        """The memory may be written to next: returns when nobody reads it in the background."""

    def turn(self) -> AbstractContextManager[None]:
        """Inside, no other thread uses the model, so whatever is written to the memory is written by this one."""

    def current(self) -> torch.Tensor:
        """The value as it is now."""

    def keep(self, value: torch.Tensor, name: str) -> None:
        """Keeps `value`, to which the operation `name` has written, or refuses."""


class FollowedView(torch.Tensor):
    """See the module's docstring. `_memory` is the whole value, of whose memory this is a view."""

    _source: Source
    _memory: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in _UNFOLLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if meets_placeholder(types):
            return NotImplemented
        views: list[FollowedView] = []
        pytree.tree_map_only(FollowedView, views.append, (args, kwargs))
        with in_turns(view._source for view in views):
            return _compute(func, views, args, kwargs)

    def _renew(self) -> None:
        """Brings the memory up to date if an update or a write has changed the value since."""
        changes = self._source.changes()
        if changes is None or changes == self._memory._changes:  # type: ignore[attr-defined]
            return
        with torch.no_grad():
            now = self._source.current()  # waits for the update
            if not shares(self._memory, now):
                self._memory.copy_(now)
        _mark(self._memory, self._source)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _compute(func: Callable[..., Any], views: list[FollowedView], args: Any, kwargs: Any) -> Any:
    """Runs `func`, and keeps what it has written to the memory of `views`."""
    for view in views:
        view._renew()
        view._source.make_way()
    versions = [version_of(view) for view in views]
    name = getattr(func, "__name__", "this")
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = call_counted(func, args, kwargs, views)
    except RuntimeError as error:
        if "another view of its base has been modified" not in str(error):
            raise
        raise StateError(
            "a view of a weight, taken with gradients, is used after the weight has changed, and its graph is one of "
            "before. Take it again from the parameter."
        ) from error
    if name in ("numpy", "__array__"):
        result.setflags(write=False)  # a write to it could not be seen
    for view, version in zip(views, versions, strict=True):
        if version_of(view) != version:
            view._source.keep(view._memory, name)
            _mark(view._memory, view._source)
    return follow(result, [(view._source, view._memory) for view in views])


def call_counted(func: Callable[..., Any], args: Any, kwargs: Any, values: Iterable[torch.Tensor]) -> Any:
    """Calls `func`. What a collective writes to `values` is counted as autograd counts writes, which torch leaves out.

    A collective in the background is waited for, because nobody would see when it has written. Sending writes nothing.
    """
    if getattr(func, "__module__", "") != dist.distributed_c10d.__name__ or func in (dist.send, dist.isend):
        return func(*args, **kwargs)
    if func is dist.irecv:  # its peer may send only after this rank has gone on
        raise StateError(
            "irecv was given a weight, but when it writes is not seen. Receive into a tensor of your own, wait, and "
            "copy it to the weight: p.data.copy_(received)."
        )
    before = [(value, value.detach().clone()) for value in values]
    result = func(*args, **kwargs)
    if isinstance(result, dist.Work):
        result.wait()
    torch.autograd.graph.increment_version([value for value, held in before if not torch.equal(value, held)])
    return result


@contextmanager
def in_turns(sources: Iterable[Source]) -> Iterator[None]:
    """Takes the turns of all their models, in one order for all threads."""
    with ExitStack() as stack:
        for turn in sorted({source.turn() for source in sources}, key=id):
            stack.enter_context(turn)
        yield


def follow(result: Any, lent: list[tuple[Source, torch.Tensor]]) -> Any:
    """`result`, in which tensors that share memory with a value report writes to them."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, (FollowedView, nn.Parameter, Placeholder)):
            return tensor
        for source, memory in lent:
            if shares(tensor, memory):
                with torch._C.DisableTorchFunctionSubclass():
                    if tensor.requires_grad:  # it may still be written to under torch.no_grad()
                        view = tensor.as_subclass(FollowedView)
                    else:
                        view = torch.Tensor._make_subclass(FollowedView, tensor)  # detached, whatever is written to it
                view._source, view._memory = source, memory
                hold(source, view)
                if not hasattr(memory, "_changes"):
                    _mark(memory, source)
                return view
        return tensor

    if isinstance(result, torch.Tensor):
        return wrap(result)
    return pytree.tree_map_only(torch.Tensor, wrap, result) if isinstance(result, (list, tuple)) else result


def hold(source: Any, tensor: torch.Tensor) -> None:
    """Remembers, as long as it lives, that a user has `tensor` over the value of `source`."""
    vars(source).setdefault("_held", WeakTensorKeyDictionary())[tensor] = None


def end_views(source: Any, value: Callable[[], torch.Tensor]) -> None:
    """What users hold over the value of `source` is over the memory of `value()` from now on, and plain tensors."""
    held = list(_take_held(source))
    if not held:
        return
    with torch.inference_mode(False), torch.no_grad():
        memory = value().detach().contiguous()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in held:
            part = memory
            if isinstance(tensor, FollowedView):
                start = int(tensor.storage_offset()) - int(tensor._memory.storage_offset())
                part = memory.as_strided(tensor.shape, tensor.stride(), int(memory.storage_offset()) + start)
                del tensor._source, tensor._memory
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
            torch.Tensor.data.__set__(tensor, part)  # type: ignore[attr-defined]


def _take_held(source: Any) -> Iterator[torch.Tensor]:
    for tensor in vars(source).pop("_held", ()):
        yield tensor
        yield from _take_held(tensor)


def forget_plain(source: Any) -> None:
    """Views that do not follow are copies from now on."""
    held = vars(source).get("_held", {})
    for tensor in [tensor for tensor in held if not isinstance(tensor, FollowedView)]:
        del held[tensor]


def _mark(memory: torch.Tensor, source: Source) -> None:
    memory._changes = source.changes()  # type: ignore[attr-defined]


def shares(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether both share memory."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.untyped_storage()._cdata == value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return False


def version_of(tensor: torch.Tensor) -> int:
    """How often its memory was written to, as autograd counts."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version
