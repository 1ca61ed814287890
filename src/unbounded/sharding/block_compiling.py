"""Compiles the repeated blocks of a model, if the plan asks for it (`compile`).

Blocks are compiled one by one, because the engine gathers weights between them: a graph of the whole model would break
there. What is compiled is called from inside the engine's hooks and the activation policies, like a block that the user
has compiled before `shard`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from unbounded.compiled.graphs import inductor
from unbounded.errors import PlanError
from unbounded.planner.spelling import find_closest
from unbounded.sharding.block_policies import find_blocks


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
    return partial(_make_plain, [weakref.ref(block) for block in blocks])


def _make_plain(blocks: list[weakref.ref[nn.Module]]) -> None:
    """Whoever keeps this must not keep the model alive."""
    for held in blocks:
        if (block := held()) is not None:
            block._compiled_call_impl = None


def _do_nothing() -> None:
    pass
