"""Replaces tensors among the arguments of a call, inside the caller's own containers.

A list, dict or object that the model fills must be the caller's own. So containers are passed on unchanged. A tensor in
a mutable container or a dataclass is replaced during the call and put back afterwards; only tuples around such a tensor
are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from unbounded.zero.passes.capture import is_capturing
from unbounded.zero.placeholder import Placeholder

_DEPTH = 8


class Arguments:
    """Of one call at a time; a kind of it says what takes the place of a tensor."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, Any, Any, Any]] = []  # container, key, what the caller had, what is there now

    def adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward."""
        return tuple(self._walk(arg, _DEPTH) for arg in args), {k: self._walk(v, _DEPTH) for k, v in kwargs.items()}

    def restore(self) -> None:
        """The forward is over: the caller's containers hold the caller's tensors again, and what the model put in."""
        replaced, self._replaced = self._replaced, []
        for container, key, given, placed in reversed(replaced):
            try:
                if container[key] is placed:
                    container[key] = given
            except (KeyError, IndexError):  # the model removed it
                continue

    def _walk(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._adapt(value)
        if depth == 0:
            return value
        if isinstance(value, list):
            return self._replace(value, enumerate(value), depth)
        if isinstance(value, MutableMapping):
            return self._replace(value, list(value.items()), depth)
        if isinstance(value, tuple):
            items = [self._walk(item, depth - 1) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if is_dataclass(value) and hasattr(value, "__dict__"):
            held = vars(value)
            self._replace(held, [(one.name, held[one.name]) for one in fields(value) if one.name in held], depth)
        return value

    def _replace(self, container: Any, items: Iterable[tuple[Any, Any]], depth: int) -> Any:
        for key, item in list(items):
            adapted = self._walk(item, depth - 1)
            if adapted is not item:
                container[key] = adapted
                self._replaced.append((container, key, item, adapted))
        return container

    def _adapt(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Inputs(Arguments):
    """Moves tensors to `device`, and casts fp32 ones to `dtype` if the plan lowered the model's."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype
        self._read: torch.cuda.Event | None = None  # the last read of the caller's pinned memory, perhaps in flight

    def adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._device.type == "cpu" and self._dtype is None:
            return args, kwargs
        return super().adapt(args, kwargs)

    def restore(self) -> None:
        """The caller may write to its tensors now, so they must have been read. The GPU is busy with the forward."""
        super().restore()
        read, self._read = self._read, None
        if read is not None:
            read.synchronize()

    def _adapt(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self._device and tensor.device.type != "meta":
            tensor = self._move(tensor)
        if self._dtype is not None and tensor.dtype == torch.float32:
            tensor = tensor.to(self._dtype)
        return tensor

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._device, non_blocking=self._device.type == "cuda")
        if tensor.layout == torch.strided and tensor.is_pinned() and not is_capturing(self._device):
            self._read = torch.cuda.current_stream(self._device).record_event()
        return moved


class ParameterValues(Arguments):
    """What compiled code gets: values, where a block is given a parameter itself, which holds none."""

    def _adapt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor) if isinstance(tensor, Placeholder) else tensor
