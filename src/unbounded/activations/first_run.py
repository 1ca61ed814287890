"""What a block was like when it ran first, so that it runs the same again in the backward and leaves nothing behind.

Between the two, users call `eval()`, switch adapters, remove hooks, freeze weights and evaluate, and a forward may
change what the block has: running statistics, the vectors of a spectral norm, a state that it carries on, a list. So
the second run gets the attributes, buffers, hooks and random numbers that the first one began with, and what it sets is
dropped. Attributes are plain values, tensors, generators of random numbers, and containers of these; other objects are
what they are at the moment.

Note: what is learned. Small tensors are always copied. A large one (a mask, a table) is copied the first time, and no
longer if that run did not change it. If it is changed later, the run is refused: its old value is lost. In the same
way, a block that does not draw from the global generators of Python and numpy in its first runs is only looked at now
and then. Those belong to all threads: if others draw from them too, what they draw while a block runs again repeats.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from unbounded.errors import StateError

SMALL_BYTES = 2**16
_FIRST_RUNS, _TURN_RUNS = 2, 16
_DEPTH = 3  # of containers in containers that are copied
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_CONTAINERS = {list, tuple, set, dict, deque, Counter, OrderedDict, defaultdict}
_OF_MODULES = vars(nn.Module()).keys() - {"training"} | {"_compiled_call_impl"}
_HOOKS = sorted(key for key in _OF_MODULES if key.startswith("_forward"))
_COPIES: dict[type, Callable[[Any], Any]] = {
    torch.Generator: torch.Generator.clone_state,
    random.Random: copy.deepcopy,
    np.random.Generator: copy.deepcopy,
    np.random.RandomState: copy.deepcopy,
}


@dataclass
class _TensorBefore:
    """A buffer or another tensor of a module before the first run: a copy of it, or itself with its version then."""

    module: nn.Module
    place: dict[str, Any]
    key: str
    held: torch.Tensor
    version: int
    copy: torch.Tensor | None
    is_in_graph: bool

    def put(self, copies: dict[int, torch.Tensor]) -> None:
        """Gives the module the value from before; `copies` are for this run, by the id of the copy that is kept."""
        value = copies.get(id(self.copy), self.held)
        # Of the graph it had, the second run needs only that there was one.
        self.place[self.key] = value.detach().requires_grad_().view_as(value) if self.is_in_graph else value


class Habits:
    """What runs of one block have done, as long as the same parts of it train."""

    def __init__(self) -> None:
        self._training: list[bool] = []
        self.num_runs = 0
        self.still: set[tuple[nn.Module, str]] = set()  # the large tensors that they leave as they are
        self.are_drawing = False  # from the global generators of Python and numpy

    def begin_run(self, training: list[bool]) -> None:
        if training != self._training:
            self._training, self.num_runs, self.still, self.are_drawing = training, 0, set(), False
        self.num_runs += 1

    @property
    def is_looked_at(self) -> bool:
        """Whether it is worth while to look for draws in this run."""
        return self.are_drawing or self.num_runs <= _FIRST_RUNS or self.num_runs % _TURN_RUNS == 0


class FirstRun:
    """What `block` is like before it runs. `end` comes after that run, and `again` is around later ones."""

    def __init__(self, name: str, block: nn.Module, habits: Habits) -> None:
        self._name, self._habits = name, habits
        self._modules = modules = list(block.modules())
        self._keys = [set(vars(module)) for module in modules]
        self._attributes = [_copy_attributes(module) for module in modules]
        self._hooks = [_copy_hooks(module) for module in modules]
        self._trained = _read_trained(_parameters(modules))
        habits.begin_run([module.training for module in modules])
        copies: dict[Any, torch.Tensor] = {}  # by memory: a buffer that two modules hold is copied once
        self._seen = [
            self._look(module, place, key, tensor, copies)
            for module in modules
            for place, key, tensor in _tensors_of(module)
        ]
        self._draws = _read_draws() if habits.is_looked_at else None

    def end(self) -> None:
        """Learns from the run which tensors it has changed, and whether it has drawn random numbers."""
        if self._draws is not None:
            self._note_draws(self._draws)
        for seen in self._seen:
            if seen.copy is None:
                self._refuse_change(seen)
            elif seen.held.nbytes > SMALL_BYTES and _is_unchanged(seen):
                self._habits.still.add((seen.module, seen.key))
                seen.copy = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """What runs inside finds the block as it was, and leaves it as it is."""
        parameters = _parameters(self._modules)
        trained = _read_trained(parameters)
        attributes = [dict(vars(module)) for module in self._modules]
        values = [seen.place.get(seen.key) for seen in self._seen]
        draws = _read_draws() if self._draws is not None else None
        for module, keys, before in zip(self._modules, self._keys, self._attributes, strict=True):
            for key in vars(module).keys() - keys - _OF_MODULES:
                del vars(module)[key]
            vars(module).update(_copied(before, _DEPTH + 1))
        for module, hooks in zip(self._modules, self._hooks, strict=True):
            if _copy_hooks(module) != hooks:
                vars(module).update({key: hooks.get(key, {}) for key in _HOOKS})
        _set_trained(parameters, self._trained)
        copies = {id(seen.copy): seen.copy.clone() for seen in self._seen if seen.copy is not None}
        for seen in self._seen:
            seen.put(copies)
        if self._draws is not None:
            _put_draws(self._draws)
        try:
            yield
        finally:
            if draws is not None:
                _put_draws(draws)
            for seen, value in zip(self._seen, values, strict=True):
                seen.place[seen.key] = value
            _set_trained(parameters, trained)
            for module, held in zip(self._modules, attributes, strict=True):
                _put_back(vars(module), held)

    def _look(
        self, module: nn.Module, place: dict[str, Any], key: str, tensor: torch.Tensor, copies: dict[Any, torch.Tensor]
    ) -> _TensorBefore:
        kept = self._copy(module, key, tensor, copies)
        # A graph of the forward before, in which there is a first run, which holds a graph, ... would never end.
        held = tensor.detach() if tensor.requires_grad else tensor
        return _TensorBefore(module, place, key, held, tensor._version, kept, tensor.requires_grad)

    def _copy(
        self, module: nn.Module, key: str, tensor: torch.Tensor, copies: dict[Any, torch.Tensor]
    ) -> torch.Tensor | None:
        is_known = tensor.requires_grad or (module, key) in self._habits.still  # one with a graph is an activation
        if tensor.nbytes > SMALL_BYTES and is_known:
            return None
        memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if memory not in copies:
            copies[memory] = tensor.detach().clone()
        return copies[memory]

    def _note_draws(self, before: tuple[Any, bytes]) -> None:
        if before == _read_draws():
            self._draws = None
            return
        is_late = not self._habits.are_drawing and self._habits.num_runs > _FIRST_RUNS
        self._habits.are_drawing = True
        if is_late:  # no error: it may have been another thread
            warnings.warn(
                f"block {self._name!r}, or another thread while it ran, has drawn from Python's or numpy's generator "
                "of random numbers for the first time. From now on the block is recomputed with the same numbers; "
                f"up to {_TURN_RUNS - 1} runs before were not watched. Drawing with torch is always seen.",
                stacklevel=2,
            )

    def _refuse_change(self, seen: _TensorBefore) -> None:
        if seen.held._version != seen.version:
            self._habits.still.discard((seen.module, seen.key))
            raise StateError(
                f"block {self._name!r} has begun to change its tensor {seen.key!r}, so it cannot run again in the "
                'backward as it ran first. Run this batch again, or give the block the activation policy "keep".'
            )


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The buffers of a module and the tensors among its attributes, with the dict that holds each."""
    for key, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_inference():
            yield module._buffers, key, buffer
    attributes = vars(module)
    for key, value in attributes.items():
        if type(value) is torch.Tensor and not value.is_inference():
            yield attributes, key, value


def _is_unchanged(seen: _TensorBefore) -> bool:
    """Whether the run has left the tensor as it was; norms write to theirs without counting their version up."""
    assert seen.copy is not None
    if seen.held._version != seen.version:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return torch.equal(seen.held, seen.copy)


def _copy_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has besides tensors: `training`, a scale, the adapter in use, a list that it fills."""
    return {
        key: _copied(value)
        for key, value in vars(module).items()
        if key not in _OF_MODULES and (type(value) in _PLAIN or type(value) in _CONTAINERS or type(value) in _COPIES)
    }


def _copied(value: Any, depth: int = _DEPTH) -> Any:
    """`value`, of which containers, generators of random numbers and small tensors are copied, without graphs."""
    kind = type(value)
    if kind in _COPIES:
        return _COPIES[kind](value)
    if kind is torch.Tensor and not value.is_inference():
        part = value.detach()
        is_copied = part.nbytes <= SMALL_BYTES and not value.requires_grad
        return part.clone() if is_copied else part.requires_grad_(value.requires_grad)
    if kind not in _CONTAINERS or depth == 0:
        return value
    if kind is dict:
        return {key: _copied(part, depth - 1) for key, part in value.items()}
    if kind is list or kind is tuple:
        return kind(_copied(part, depth - 1) for part in value)
    return copy.copy(value)


def copy_generator(value: Any) -> Any:
    """A generator of random numbers where it is now; anything else as it is."""
    copied = _COPIES.get(type(value))
    return value if copied is None else copied(value)


def _copy_hooks(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    return {key: hooks.copy() for key in _HOOKS if (hooks := attributes[key])}


def _read_draws() -> tuple[Any, bytes]:
    """Where the generators of Python and numpy are; that of torch is kept by its checkpoint."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def _put_draws(draws: tuple[Any, bytes]) -> None:
    random.setstate(draws[0])
    np.random.set_state(pickle.loads(draws[1]))


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
