"""The sharded models of this process: what runs each of them, found by the model or by one of its parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from unbounded.errors import PlanError, StateError
from unbounded.parallel.applied import Applied
from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.pipeline.runner import Loss, Pipeline
from unbounded.parallel.pipeline.stage_exchange import sum_among
from unbounded.parallel.pipeline.stages import cut_model
from unbounded.parallel.tensor.head.vocabulary import HeadPart
from unbounded.ranks.wire import Wire
from unbounded.tiers.lane import Lane
from unbounded.tiers.tiers import Tiers
from unbounded.zero.parameters.stage_copies import leave_to_first, sum_copies
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.shown_values import shown_values

_sharded: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()
# The lanes of every model whose memory is not yet free, by that memory; the model may be gone already.
_lanes: weakref.WeakKeyDictionary[Tiers, tuple[weakref.ref[nn.Module], Sequence[Lane]]] = weakref.WeakKeyDictionary()
# Less than this is not worth a garbage collection.
NEGLIGIBLE_BYTES = 256 * 2**20
_PARTS = "_unbounded_parts"  # an attribute of the model, which the parts hold: a table would keep it alive


def enrol(model: nn.Module, state: Sharded, parts: Applied) -> None:
    """From now on `model` is sharded. `parts` is what the parallel axes did to it, undone when it is detached."""
    _sharded[model], model.__dict__[_PARTS] = state, parts
    _lanes[state.tiers] = weakref.ref(model), state.lanes
    parts.attach()
    state.add_detach(partial(_detach_parts, weakref.ref(model)))


def strike_off(model: nn.Module) -> None:
    """`model` is no longer sharded."""
    _sharded.pop(model, None)


def free_dropped() -> None:
    """Frees sharded models that nobody holds any more, because the next one is placed into the memory that is free.

    Their objects hold each other in cycles, and an update that was running when they were dropped holds them too.
    """
    if sum(use.used_bytes for tiers in list(_lanes) for use in tiers.use().values()) < NEGLIGIBLE_BYTES:
        return
    gc.collect()
    for model, lanes in list(_lanes.values()):
        if model() is None:
            for lane in lanes:
                lane.drain()
    gc.collect()


def _detach_parts(held: weakref.ref[nn.Module]) -> None:
    model = held()
    if model is not None:
        model.__dict__.pop(_PARTS).detach()


def sharded(model: nn.Module) -> Sharded:
    """What runs a sharded model, whose last forward may have been interrupted."""
    try:
        state = _sharded[model]
    except KeyError:
        raise StateError("this model is not sharded. Call unbounded.shard(model, optimizer) first.") from None
    with state.engine.turn():
        state.engine.recover()
        state.engine.lending.copies.settle()
    return state


def find_sharded(model: nn.Module) -> Sharded | None:
    """What runs a model; None for one that is not sharded."""
    return _sharded.get(model)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has taken this model."""
    return model in _sharded


def find_model(parameter: nn.Parameter) -> nn.Module | None:
    """The sharded model that a parameter belongs to; None for one that is not sharded."""
    unit = getattr(parameter, "_unit", None)
    return next((model for model, state in _sharded.items() if unit in state.engine.units), None)


def cut_head(model: nn.Module) -> HeadPart | None:
    """This rank's part of the vocabulary, if a tensor axis cuts the one head of a sharded model."""
    parts = model.__dict__.get(_PARTS)
    return next(iter(parts.heads.values())) if parts is not None and len(parts.heads) == 1 else None


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """All ranks must enter this. Inside, every parameter holds its full value; what is written to it is kept.

    Every rank must write the same: if they differ, all of them raise at the end.
    """
    state = sharded(model)
    if state.optimizer is not None:
        state.optimizer.wait()
    with torch.no_grad(), shown_values(state.engine):
        yield


def pipeline(
    model: nn.Module, loss: Loss | None = None, *, targets: Sequence[str] = (), reduction: str = "mean"
) -> Pipeline:
    """All ranks must call this. Runs the batches of a model that was sharded with a pipeline axis.

    Call the result with a batch: it runs the forwards and backwards of all micro-batches and returns the batch's loss,
    the same on every rank. Then call `optimizer.step()` as usual. The loss is the model's own (`labels` in the batch),
    or `loss(output, batch)` of what the model returns; `targets` names the parts of the batch that only `loss` reads.
    The losses of micro-batches are averaged, or added up with reduction="sum". A model without a pipeline axis runs as
    one stage.
    """
    if reduction not in ("mean", "sum"):
        raise PlanError(f'reduction is {reduction!r}. Choose "mean" or "sum".')
    state = sharded(model)
    engine, axes, parts = state.engine, state.engine.axes, model.__dict__[_PARTS]
    wire = Wire(axes.pipeline)

    @contextmanager
    def summed() -> Iterator[None]:
        for ranks, parameters in parts.copies:
            if axes.pipeline.rank != ranks[0]:
                leave_to_first(parameters)
        yield
        for ranks, parameters in parts.copies:
            sum_copies(parameters, lambda tensor: sum_among(tensor, ranks, wire))  # noqa: B023

    hollow = parts.hollow or HollowModel(model, cut_model(model, 1, 1), axes.pipeline, state.engine.device)
    return Pipeline(
        model,
        hollow,
        axes.pipeline,
        state.engine.device,
        schedule=state.plan.schedule or "1f1b",
        num_micros=state.plan.microbatches if axes.pipeline.size > 1 else 1,
        trainer=state.optimizer,
        summed=summed,
        confirm=lambda text: parts.phases.confirm(text, names=["pipeline"]),
        holds=lambda: engine.has_gradients,
        loss=loss,
        targets=targets,
        reduction=reduction,
    )
