"""Ranks that compute one copy of the model must be given the same batch. Otherwise they would train on a mixture.

A sampler that divides the data by all ranks instead of by the data axis is wrong from the first batch on, so only that
one is compared by its values. The shapes of all batches are compared: collectives of different sizes would hang, or
abort in the backend.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.native.bulk import dense_parts, flat
from unbounded.parallel.tensor.dropout import drops_anything
from unbounded.ranks.axis import Axis
from unbounded.ranks.phases import CopyPhases


def check_same_batch(axes: Sequence[Axis], batch: Any) -> None:
    """All ranks of the axes must call this. Raises on all of them if some have been given another batch."""
    mark, where = _mark(batch), ""
    for axis in axes:
        told = axis.objects((mark, where), "the comparison of first batches")
        where = next((text for _, text in told if text), axis.name if len({own for own, _ in told}) > 1 else "")
    if where:
        raise StateError(
            f"ranks of the {where} axis were given different batches, but they compute one copy of the model. Divide "
            "the data by the data axis alone: its rank and size are those of optimizer.engine.axes.data."
        )


def attach_check(
    model: nn.Module, axes: Sequence[Axis], phases: CopyPhases, standing: Callable[[], str]
) -> Callable[[], None]:
    """All ranks of the axes must call this. Compares every forward of the model; the returned function ends that.

    Before each, ranks wait until all of them are about to run it, with a batch of the same shapes, in the same mode and
    with the same `standing`; if anything is dropped, also with the same random state. The contents of batches are
    compared once.
    """
    is_first, drops = True, drops_anything(model)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_first
        kind = "a forward with gradients" if torch.is_grad_enabled() else "a forward without gradients"
        mode = "model.train()" if model.training else "model.eval()"
        numbers = _describe_numbers(model) if drops and model.training else "no dropout"
        detail = f"{standing()}; {mode}; {numbers}; {describe_shapes((args, kwargs))}"
        phases.confirm(kind, detail, [axis.name for axis in axes])
        if is_first:
            is_first = False
            check_same_batch(axes, (args, kwargs))

    return model.register_forward_pre_hook(before, with_kwargs=True).remove


def _describe_numbers(model: nn.Module) -> str:
    """The random state from which dropout draws, in words. On CUDA it is a seed and a counter."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        return f"a random state of seed {generator.initial_seed()} after {generator.get_offset()} numbers"
    return f"the random state {zlib.crc32(torch.get_rng_state().numpy().data):08x}"


def autocast_dtypes() -> dict[str, torch.dtype]:
    """What autocast computes products in, by the kind of device where it is on."""
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def describe_shapes(batch: Any) -> str:
    """The tensors of a batch in words, without their values, and what autocast makes of them."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    tensors = [(path[-1], leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    shapes = ", ".join(f"{_name(key)} {tuple(leaf.shape)}" for key, leaf in tensors) or "no tensors"
    return f"a batch of {shapes}{''.join(f', under autocast to {dtype}' for dtype in autocast_dtypes().values())}"


def _name(key: Any) -> str:
    return str(key.key) if isinstance(key, pytree.MappingKey) else "a tensor"


def _mark(batch: Any) -> int:
    mark = 0
    for leaf in pytree.tree_leaves(batch):
        if type(leaf) is torch.Tensor and not leaf.is_meta:
            mark = zlib.crc32(str(tuple(leaf.shape)).encode(), mark)
            for part in dense_parts(leaf.cpu()):
                mark = zlib.crc32(flat(part).view(torch.uint8).numpy().data, mark)
    return mark
