"""What the blocks of any module keep and move, seen with inputs that its user gives.

Only a model of `transformers` says what it reads. Of others a copy without any memory is called once, as its user calls
the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from unbounded.errors import PlanError
from unbounded.planner.models.footprint import Cost
from unbounded.planning.dry_run import quietly
from unbounded.planning.known_values import KnownValues
from unbounded.planning.watched_forward import WatchedForward

_SHOWN_CHARS = 300


def costs_with(inputs: Any, model: nn.Module, dtypes: Mapping[str, torch.dtype], sequence: int) -> dict[str, Cost]:
    """By module, what each of `sequence` tokens keeps and moves, if a forward takes `inputs` for all of them: a dict of
    keywords, a tuple of arguments, or one argument."""
    try:
        copied, values = _copy_to_meta(model, dtypes).train(), KnownValues()
        dtype = next((one.dtype for one in copied.parameters() if one.is_floating_point()), torch.float32)
        with quietly(), values:
            given = tree_map_only(
                torch.Tensor, lambda one: one.to("meta", dtype if one.is_floating_point() else None), inputs
            )
        watched = WatchedForward(copied, values, {})
        keywords = given if isinstance(given, dict) else {}
        arguments = () if keywords else given if isinstance(given, tuple) else (given,)
        with quietly():
            watched.run(partial(copied, *arguments, **keywords))
    except Exception as error:  # a model's code may fail in any way
        said = " ".join(str(error).split())[:_SHOWN_CHARS] or type(error).__name__
        raise PlanError(
            f"the {type(model).__name__} does not run on the meta device with these inputs: {said}. Give what its "
            "forward takes for one sequence, or no inputs: then it is counted roughly, from its layers."
        ) from None
    return {
        name: Cost(
            moved=seen.moved / sequence,
            kept=seen.kept / sequence,
            input=seen.input / sequence,
            num_kernels=seen.num_kernels,
        )
        for name, seen in watched.seen.items()
    }


def _copy_to_meta(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """A copy with all tensors on the meta device, so that it takes no memory."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        like = torch.empty_like(parameter.data, dtype=dtypes.get(name, parameter.dtype), device="meta")
        memo.setdefault(id(parameter), nn.Parameter(like, parameter.requires_grad))
    for module in model.modules():
        for held in (*module._buffers.values(), *vars(module).values()):
            if isinstance(held, torch.Tensor):
                memo.setdefault(id(held), held.detach().to("meta"))
    return copy.deepcopy(model, memo)
