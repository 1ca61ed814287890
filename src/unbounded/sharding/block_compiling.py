"""Compiles the repeated blocks of a model, if the plan asks for it (`compile`).

Blocks are compiled one by one, because the engine gathers weights between them: a graph of the whole model would break
there. What is compiled is called from inside the engine's hooks and the activation policies, like a block that the user
has compiled before `shard`.

torch does not look for hooks that come to or go from modules inside a block after it was compiled. So if there are
others than in its first call, the block runs plain, hooks included, until they are as they were.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from unbounded.compiled.graphs import inductor
from unbounded.errors import PlanError
from unbounded.planner.spelling import find_closest
from unbounded.sharding.block_policies import find_blocks

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = [getattr(torch_module, f"_global{name}") for name in _HOOKS]


@contextmanager
def compiled_blocks(model: nn.Module, how: bool | str) -> Iterator[Callable[[], None]]:
    """Compiles the blocks that are not compiled yet, and gives a function that makes them plain again.

    They are plain again, too, if the block raises.
    """
    undo = _compile(model, how) if how else _do_nothing
    try:
        yield undo
    except BaseException:
        undo()
        raise


def _compile(model: nn.Module, how: bool | str) -> Callable[[], None]:
    backend = "inductor" if how is True else str(how)
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        usual = torch._dynamo.list_backends()
        closest = find_closest(backend, usual)
        hint = f" Did you mean {closest!r}?" if closest else f" Choose True, or one of {', '.join(usual)}."
        raise PlanError(f"compile is {how!r}, but torch.compile has no such backend.{hint}")
    blocks = [block for block in find_blocks(model).values() if block._compiled_call_impl is None]
    if not blocks:
        warnings.warn(
            f"compile={how!r} has no effect, because the model has no repeated blocks that are not compiled already.",
            stacklevel=5,
        )
    for block in blocks:
        block.compile(backend=inductor if backend == "inductor" else backend)
        block._compiled_call_impl = partial(_call, _Compiled(block))
    return partial(_make_plain, [weakref.ref(block) for block in blocks])


class _Compiled:
    """The two ways to call a block, and the hooks inside it that the compiled one knows."""

    def __init__(self, block: nn.Module) -> None:
        assert block._compiled_call_impl is not None
        self.block, self.compiled = block, block._compiled_call_impl
        self.known: frozenset[int] | None = None  # since its first call
        self.last: Callable[..., Any] = self.compiled


# Not recursive: what it calls is compiled.
@torch.compiler.disable(recursive=False)
def _call(ways: _Compiled, *args: Any, **kwargs: Any) -> Any:
    # In a backward it runs again, as it did first: tensors that one way has saved are not those of the other.
    if torch._C._current_graph_task_id() == -1:
        hooks = _hooks_inside(ways.block)
        if ways.known is None:
            ways.known = hooks
        ways.last = ways.compiled if hooks == ways.known else ways.block._call_impl
    return ways.last(*args, **kwargs)


def _hooks_inside(block: nn.Module) -> frozenset[int]:
    """The numbers that torch gave hooks of modules inside the block, and of all modules. The block's own it sees."""
    found = [key for hooks in _HOOKS_OF_ALL for key in hooks]
    for module in block.modules():
        if module is not block:
            own = module.__dict__
            for name in _HOOKS:
                if own[name]:
                    found += own[name]
    return frozenset(found)


def _make_plain(blocks: list[weakref.ref[nn.Module]]) -> None:
    """Whoever keeps this must not keep the model alive."""
    for held in blocks:
        if (block := held()) is not None:
            block._compiled_call_impl = None


def _do_nothing() -> None:
    pass
