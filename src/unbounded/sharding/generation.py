"""Generation over ranks: transformers' `generate` ends at a different token on each of them.

A rank that is done goes on for the others, whose weights it helps to gather. In assisted decoding (a smaller model or a
look at the prompt proposes tokens) transformers adds what it finds then to the answer, so that is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unbounded.calls import find_call
from unbounded.errors import StateError
from unbounded.own_hook import OwnHook

MARK = "_is_fsdp_managed_module"
"""What transformers looks for: `generate` then runs on each rank until all are done."""


class _Marked:
    """True for a sharded model; a copy of one is a plain model."""

    def __deepcopy__(self, memo: Any) -> bool:
        return False


def generate_together(model: nn.Module) -> Callable[[], None]:
    """Makes `generate` run equally often on all ranks, which gather weights together; returns what undoes it."""
    parts = [part for part in model.modules() if hasattr(part, "generate")]
    for part in parts:
        setattr(part, MARK, _Marked())
    handles = [part.register_forward_pre_hook(OwnHook(_refuse_assisted)) for part in parts]
    marked = [weakref.ref(part) for part in parts]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for part in filter(None, (held() for held in marked)):
            vars(part).pop(MARK, None)

    return undo


def _refuse_assisted(module: nn.Module, _: Any) -> None:
    decode = getattr(type(module), "_assisted_decoding", None)
    if decode is None or torch.is_grad_enabled():
        return
    call = find_call(inspect.unwrap(decode))
    if call is not None and call.f_locals.get("synced_gpus"):
        raise StateError(
            "ranks that share the weights cannot decode with an assistant or by prompt lookup: one that is done would "
            "go on adding tokens to its answer until all are. Leave them out, or call generate with synced_gpus=False "
            "inside `with unbounded.full_params(model):` on every rank."
        )
