"""Values that a model's code asks for while it runs on the meta device, where tensors have none.

What follows from known values alone (ids, positions, masks) is also computed on the CPU, beside the meta tensors. A
choice by unknown values (of experts, by their scores) takes everything equally often. An unknown mask is taken to let
everything pass. Models that ask for more, such as an unknown number, fail.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Elements whose values are followed: enough for choices and masks, not for what is computed from them.
_MOST_WHOLE, _MOST_BROKEN = 2**22, 2**14
_CHOICES = frozenset({f"aten::{name}" for name in ("topk", "sort", "argsort", "argmax", "argmin")})
_FILLED = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")  # whatever the values of their arguments
_UNFILLED = ("empty", "new_empty")
_META = torch.device("meta")


def find_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results. It is called for every operation, and torch's own way takes ten times as
    long."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from find_tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from find_tensors(item)


class KnownValues(TorchDispatchMode):
    """Follows values while a model runs on the meta device, by the storages that they are in."""

    def __init__(self) -> None:
        super().__init__()
        # With the storage itself, so that no other one takes its place.
        self._known: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        given = list(find_tensors((args, kwargs)))
        if given and not any(tensor.is_meta for tensor in given) and not _goes_to_meta(kwargs):
            return func(*args, **kwargs)
        is_known = name.startswith(_FILLED) or all(self._value(tensor) is not None for tensor in given)
        if _depends_on_values(func, given, kwargs):
            return self._answer(func, args, kwargs, is_known=is_known)
        found = _run_on_meta(func, name, args, kwargs)
        if func.is_view or name.startswith(_UNFILLED) or torch.Tag.nondeterministic_seeded in func.tags:
            return found
        made = list(find_tensors(found))
        if is_known and all(map(_is_small, made)):
            with contextlib.suppress(NotImplementedError):  # kernels that the CPU lacks
                self._follow(made, func(*self._values(args), **self._values(kwargs)))
        elif func._schema.is_mutable:
            for tensor in made or given[:1]:
                self._known.pop(tensor.untyped_storage()._cdata, None)
        elif func._schema.name in _CHOICES:
            self._set(made[-1], _choose(made[-1], func, args, kwargs))
        return found

    def _answer(self, func: Any, args: Any, kwargs: Any, *, is_known: bool) -> Any:
        """What depends on values: a number, or a tensor of so many elements."""
        if not is_known and not any(tensor.dtype == torch.bool for tensor in find_tensors((args, kwargs))):
            raise NotImplementedError(f"{func} asks for values that are not known")
        answered = func(*self._values(args), **self._values(kwargs))
        if isinstance(kwargs.get("device"), torch.device):
            return answered
        made = tree_map_only(torch.Tensor, lambda value: torch.empty_like(value, device=_META), answered)
        if is_known:
            self._follow(list(find_tensors(made)), answered)
        return made

    def _follow(self, made: list[torch.Tensor], values: Any) -> None:
        for tensor, value in zip(made, find_tensors(values), strict=True):
            if tensor.is_meta and self._value(tensor) is None:
                self._set(tensor, value)

    def _set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        whole = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu")
        self._known[storage._cdata] = storage, whole
        whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_meta:
            return tensor
        _, whole = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        if whole is None or whole.dtype != tensor.dtype:
            return None
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _values(self, tree: Any) -> Any:
        """The same with values: of masks that are not known ones, and zeros of other tensors."""

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                value = self._value(leaf)
                is_true = leaf.dtype == torch.bool
                if value is None:
                    value = torch.full((), is_true, dtype=leaf.dtype, device="cpu").expand(leaf.shape)
                return value
            return torch.device("cpu") if leaf == _META else leaf

        return tree_map_only((torch.Tensor, torch.device), stand_in, tree)


class WrittenValues(TorchFunctionMode):
    """Numbers that become texts, such as names of experts, and lists that become tensors: torch asks for neither."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), args[1])
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == _META:
            return func(*args, **{**kwargs, "device": "cpu"}).to(_META)
        return func(*args, **kwargs)


def _goes_to_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") == _META


def _depends_on_values(func: Any, given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the result is a number, or has as many elements as values say, or leaves the meta device."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape in func.tags:
        is_index = func._schema.name == "aten::index"
        return not is_index or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    device = kwargs.get("device")
    return bool(given) and isinstance(device, torch.device) and device != _META


def _run_on_meta(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name != "_grouped_mm":
        return func(*args, **kwargs)
    # Its kernels take more types than it does on the meta device.
    first, second, *more = args
    return func(first.bfloat16(), second.bfloat16(), *more, **kwargs).to(first.dtype)


def _is_small(tensor: torch.Tensor) -> bool:
    most = _MOST_BROKEN if tensor.is_floating_point() or tensor.is_complex() else _MOST_WHOLE
    return tensor.untyped_storage().nbytes() <= most * tensor.itemsize


def _choose(chosen: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Every index equally often, and none twice for a row."""
    asked = {said.name: said.default_value for said in func._schema.arguments}
    asked.update(zip(asked, args, strict=False), **kwargs)
    sizes, dim = asked["self"].shape, asked["dim"]
    indices = torch.arange(chosen.numel(), dtype=torch.int64, device="cpu")
    return (indices % (math.prod(sizes) if dim is None else sizes[dim])).view(chosen.shape)
