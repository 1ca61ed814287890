"""What a block was like when it ran first, so that it runs the same again in the backward and leaves nothing behind.

Between the two, users call `eval()`, switch adapters, freeze weights and evaluate, and a forward may change buffers of
the block: running statistics, the vectors of a spectral norm, a codebook. So the second run gets the flags, plain
attributes and buffers that the first one began with, and what it sets is dropped.

Note: which buffers are copied. Small ones always are. A large one (a mask, a table) is copied the first time, and no
longer if that run did not change it. If it is changed later, the run is refused: its old value is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unbounded.errors import StateError

SMALL_BYTES = 2**16
_PLAIN = {bool, int, float, str, type(None)}
_ROWS = {list, tuple}


@dataclass
class _BufferBefore:
    """A buffer before the first run: a copy of it, or itself with its version then."""

    module: nn.Module
    key: str
    held: torch.Tensor
    version: int
    copy: torch.Tensor | None


class StillBuffers:
    """The large buffers that the runs of one block leave as they are, as long as the same parts of it train."""

    def __init__(self) -> None:
        self._training: list[bool] = []
        self._known: set[tuple[nn.Module, str]] = set()

    def known(self, training: list[bool]) -> set[tuple[nn.Module, str]]:
        if training != self._training:
            self._training, self._known = training, set()
        return self._known


class FirstRun:
    """What `block` is like before it runs. `end` comes after that run, and `again` is around later ones."""

    def __init__(self, name: str, block: nn.Module, still: StillBuffers) -> None:
        self._name = name
        self._modules = modules = list(block.modules())
        self._plain = [_plain_attributes(module) for module in modules]
        self._trained = _read_trained(_parameters(modules))
        self._still = still.known([module.training for module in modules])
        copies: dict[Any, torch.Tensor] = {}  # by memory: a buffer that two modules hold is copied once
        self._seen = [
            _BufferBefore(module, key, buffer, buffer._version, self._copy(module, key, buffer, copies))
            for module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def end(self) -> None:
        """Learns from the run which buffers it has changed."""
        for seen in self._seen:
            if seen.copy is None:
                self._refuse_change(seen)
            elif seen.held.nbytes > SMALL_BYTES and _is_unchanged(seen):
                self._still.add((seen.module, seen.key))
                seen.copy = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """What runs inside finds the block as it was, and leaves it as it is."""
        parameters = _parameters(self._modules)
        trained = _read_trained(parameters)
        attributes = [dict(vars(module)) for module in self._modules]
        buffers = [seen.module._buffers.get(seen.key) for seen in self._seen]
        for module, plain in zip(self._modules, self._plain, strict=True):
            vars(module).update(plain)
        _set_trained(parameters, self._trained)
        copies = {id(seen.copy): seen.copy.clone() for seen in self._seen if seen.copy is not None}
        for seen in self._seen:
            seen.module._buffers[seen.key] = copies.get(id(seen.copy), seen.held)
        try:
            yield
        finally:
            for seen, buffer in zip(self._seen, buffers, strict=True):
                seen.module._buffers[seen.key] = buffer
            _set_trained(parameters, trained)
            for module, held in zip(self._modules, attributes, strict=True):
                _put_back(vars(module), held)

    def _copy(
        self, module: nn.Module, key: str, buffer: torch.Tensor, copies: dict[Any, torch.Tensor]
    ) -> torch.Tensor | None:
        if buffer.nbytes > SMALL_BYTES and (module, key) in self._still:
            return None
        memory = buffer.data_ptr(), buffer.dtype, buffer.shape, buffer.stride()
        if memory not in copies:
            copies[memory] = buffer.detach().clone()
        return copies[memory]

    def _refuse_change(self, seen: _BufferBefore) -> None:
        if seen.held._version != seen.version:
            self._still.discard((seen.module, seen.key))
            raise StateError(
                f"block {self._name!r} has begun to change its buffer {seen.key!r}, so it cannot run again in the "
                'backward as it ran first. Run this batch again, or give the block the activation policy "keep".'
            )


def _is_unchanged(seen: _BufferBefore) -> bool:
    """Whether the run has left the buffer as it was; norms write to theirs without counting their version up."""
    assert seen.copy is not None
    if seen.held._version != seen.version:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return torch.equal(seen.held, seen.copy)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has of numbers, names and flags: `training`, a scale, the adapter in use."""
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) in _PLAIN or (type(value) in _ROWS and all(type(part) in _PLAIN for part in value))
    }


def _put_back(attributes: dict[str, Any], held: dict[str, Any]) -> None:
    for key in attributes.keys() - held.keys():
        del attributes[key]
    attributes.update(held)


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]


def _read_trained(parameters: list[nn.Parameter]) -> list[bool]:
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.requires_grad for parameter in parameters]


def _set_trained(parameters: list[nn.Parameter], flags: list[bool]) -> None:
    """Sets whether parameters are trained, past what watches over it: for autograd only, while the block runs again."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, is_trained in zip(parameters, flags, strict=False):
            if parameter.requires_grad != is_trained and parameter.is_leaf:
                parameter.requires_grad = is_trained
