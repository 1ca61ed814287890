"""The front door: a model, an optimizer and a plan become a running engine, and a plain model again.

`shard` checks what it was given before it touches anything, resolves every open choice, and leaves the user's
objects in place: the same module with removable hooks, the same Parameter objects, the same param groups.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unbounded.activations.activations import activations_of
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.tiled.heads import DeferredHeads
from unbounded.errors import PlanError, StateError
from unbounded.held_interrupts import HeldBack
from unbounded.optim.book import RuleBook
from unbounded.optim.formats import DTYPES
from unbounded.optim.joined import JoinedOptimizer
from unbounded.optim.recognition import unwrap
from unbounded.own_hook import OwnHook
from unbounded.parallel.applied import Applied, take_parts
from unbounded.planner.plan import Plan
from unbounded.ranks.cut import Cut
from unbounded.sharding import device_room, running
from unbounded.sharding.block_compiling import compiled_blocks
from unbounded.sharding.block_policies import checkpoint_activations, close_activations, lifted_policies
from unbounded.sharding.device_room import balance, keep_promise, limit_reads, may_balance, promise_budget
from unbounded.sharding.generation import generate_together
from unbounded.sharding.running import enrol, is_sharded, pipeline, sharded
from unbounded.tiers.current_device import on_device
from unbounded.weights.grafts import Grafts
from unbounded.weights.pretrained import install_weights
from unbounded.zero.parameters.parameter import unmanage
from unbounded.zero.parameters.tiles import has_tiles, hide_wholes, tile_to_fit
from unbounded.zero.setup.admission import Admitted, admit, common_precision
from unbounded.zero.setup.assembly import Assembly, Fill, Sharded
from unbounded.zero.setup.blueprint import plan_units
from unbounded.zero.setup.initial import Carried, Entries, Installer, install_model, place_empty
from unbounded.zero.setup.meta import ModuleFill
from unbounded.zero.setup.sites import find_sites
from unbounded.zero.setup.specs import Holdings, find_specs
from unbounded.zero.step.optimizer import ShardedOptimizer

_expected: weakref.WeakKeyDictionary[nn.Module, os.PathLike[str]] = weakref.WeakKeyDictionary()


@torch.inference_mode(False)  # what it makes is trained, whoever calls it
def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: str | Plan | Mapping[str, Any] = "auto",
    *,
    weights: str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """All ranks must call this. Places the states of `model` and `optimizer` and returns them ready to train.

    The model is changed in place and returned. The optimizer returned is a `torch.optim.Optimizer` over the same param
    groups (None if none was given). Several optimizers, such as Muon for matrices and AdamW for the rest, become one
    that steps them all. `plan` is "auto", a `Plan`, or a dict of its fields. `weights` is a folder of safetensors that
    is streamed into a model on the meta device. `mesh` gives the axes of the job (data, tensor, pipeline, context)
    instead of the plan's sizes. If a launcher such as torchrun started this process among others and there is no
    process group yet, one is made.
    """
    optimizer = unwrap(optimizer) if optimizer is not None else None
    if weights is None and isinstance(model, nn.Module):
        weights = next((_expected[part] for part in model.modules() if part in _expected), None)
    has_folder = weights is not None
    admitted = admit(model, optimizer, plan, mesh=mesh, is_known=is_sharded(model), has_folder=has_folder)
    with on_device(admitted.device):
        return _place(model, optimizer, admitted, weights)


def _place(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    admitted: Admitted,
    weights: str | os.PathLike[str] | None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """All ranks must call this. The model's device is the current one."""
    axes, device = admitted.axes, admitted.device
    running.free_dropped()
    is_cut = max(axes.tensor.size, axes.pipeline.size, axes.context.size) > 1
    if is_cut:
        _refuse_tiles(model)
    parts = take_parts(model, optimizer, admitted.plan, axes, device)
    open_plan = close_activations(model, admitted.plan, device)
    fill = _choose_fill(model, optimizer, weights, device, parts)
    lowered = DTYPES[open_plan.precision] if open_plan.precision is not None else None
    if not is_cut:
        tile_to_fit(model, open_plan.device_bytes)
    sites = find_sites(model, with_tiles=True)
    holdings = Holdings(parts.cuts, parts.uncounted)
    groups = {id(parts.replaced[key]) if key in parts.replaced else key: g for key, g in admitted.groups.items()}
    book = RuleBook(optimizer, open_plan.optimizer_format) if optimizer is not None else None
    specs = find_specs(sites, groups, axes.data.size, lowered, holdings, book)
    promise = promise_budget(axes, device, open_plan.device_bytes)
    resolved = replace(open_plan, precision=open_plan.precision or common_precision(model))
    blueprint = plan_units(specs, resolved, axes.data, device, world_size=axes.world.size)
    cast_inputs = lowered if lowered != torch.float32 else None
    hide_wholes(model, optimizer.state if optimizer is not None else None, device, lowered)
    with lifted_policies(model), compiled_blocks(model, open_plan.compile) as make_plain:
        state = Assembly(model, sites, blueprint, axes, device, parts.phases).build(optimizer, fill, cast_inputs)
        place_empty(model, device, lowered)
        state.add_detach(make_plain, is_inner=True)
        parts.standing = partial(_describe_standing, state)
        enrol(model, state, parts)
        if parts.hollow is not None:
            parts.hollow.answer = lambda *call: pipeline(model).answer(*call)
        if promise is not None:
            keep_promise(model, state, promise)
        limit_reads(model, state)
    if blueprint.plan.activations is not None:
        checkpoint_activations(model, blueprint.plan.activations)
    state.add_detach(DeferredHeads(model, device_bytes=blueprint.plan.device_bytes, cut=parts.heads).remove)
    for member in optimizer.members if isinstance(optimizer, JoinedOptimizer) else [optimizer] if optimizer else []:
        state.add_detach(member.register_step_pre_hook(_refuse_old_optimizer).remove)
    if optimizer is not None and may_balance(admitted.plan, state):
        state.add_detach(balance(model, state))
    if optimizer is not None and not hasattr(model, "peft_config"):
        state.add_detach(_refuse_late_adapters(model))
    if blueprint.plan.stage == 3 and axes.data.size > 1:
        state.add_detach(generate_together(model))
    return model, state.optimizer  # type: ignore[return-value]


def _describe_standing(state: Sharded) -> str:
    """Whether gradients are held and what is trained, in words."""
    held = "gradients of an earlier backward" if state.engine.has_gradients else "no gradients"
    return f"{held}; {state.engine.phases.standing()}"


def _refuse_tiles(model: nn.Module) -> None:
    tile_to_fit(model, None)  # removes those that a failed call made for a budget
    if has_tiles(model):
        raise PlanError(
            "layers of the model are tiled, but the job also has a tensor, pipeline or context axis, which cuts the "
            "model too. Leave out unbounded.tile: a tensor axis makes large layers smaller."
        )


def _refuse_old_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):  # which has taken over the hooks of the one that it was made from
        return
    raise StateError(
        "this optimizer was given to `shard`, which now keeps its states, so its own step would train nothing. Use the "
        "optimizer that `shard` returned: model, optimizer = unbounded.shard(model, optimizer)."
    )


def _refuse_late_adapters(model: nn.Module) -> Callable[[], None]:
    """Makes the next forward refuse adapters that peft put into a model whose optimizer does not know them."""

    def check(module: nn.Module, _: Any) -> None:
        if hasattr(module, "peft_config"):
            raise StateError(
                "adapters were put into this model after `shard`, so its optimizer does not train them. Call "
                "get_peft_model first, then make the optimizer and call `shard` with both."
            )

    return model.register_forward_pre_hook(OwnHook(check)).remove


def expect_weights(model: nn.Module, folder: os.PathLike[str]) -> None:
    """Makes `shard` stream the safetensors in `folder` into this model, or into one that wraps it."""
    _expected[model] = folder


def _install_weights(
    model: nn.Module,
    weights: str | os.PathLike[str],
    device: torch.device,
    cuts: Mapping[int, Cut],
    absent: Mapping[int, Mapping[str, torch.Tensor]],
    carried: Carried | None,
    entries: Entries,
    installer: Installer,
) -> None:
    install_weights(model, entries, installer, weights, device, cuts=cuts, absent=absent, carried=carried)


def _choose_fill(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    weights: str | os.PathLike[str] | None,
    device: torch.device,
    parts: Applied,
) -> Fill:
    """Where the first values come from: a folder of safetensors, the modules' own initialisation, or the model."""
    absent = parts.hollow.absent() if parts.hollow is not None else {}
    states = optimizer.state if optimizer is not None else {}
    carried = (lambda parameter: states.pop(parameter, {})) if states else None
    if weights is not None:
        return partial(_install_weights, model, weights, device, parts.cuts, absent, carried)
    if any(parameter.is_meta for parameter in model.parameters()):
        meta = ModuleFill(model, device, Grafts(model), cuts=parts.cuts, absent=absent, carried=carried)
        meta.check()
        return meta.install
    return lambda entries, installer: install_model(entries, installer, carried)


@torch.inference_mode(False)
def unshard(model: nn.Module) -> nn.Module:
    """All ranks must call this. Makes it a plain model with whole parameters again, and frees everything that ran it.

    The values come to the device that the model ran on. The sharded optimizer cannot be used afterwards. Its states are
    gone, so save them first, and so are gradients that were not cleared.
    """
    state = sharded(model)
    with HeldBack():
        _unshard(model, state)
    return model


def _unshard(model: nn.Module, state: Sharded) -> None:
    engine = state.engine
    engine.refuse_inside_full_params("unbounded.unshard")
    engine.refuse_pending("unbounded.unshard()")
    if any(axis.size > 1 for axis in engine.axes.model) or has_tiles(model):
        raise StateError(
            "unshard joins what is partitioned over the data axis, but this model is also cut by tiles or by the "
            "tensor or pipeline axis. Use unbounded.export(folder, model) and load the folder into a new model."
        )
    if state.optimizer is not None:
        state.optimizer.wait()
    engine.settle()
    values: dict[nn.Parameter, torch.Tensor] = {}
    with torch.no_grad(), engine.phases.during("unbounded.unshard()"):
        for unit in engine.units:
            engine.gathering.gather([unit])
            views = unit.slot_views(unit.buffer)
            values |= {p: view.clone() for p, view in zip(unit.views.parameters, views, strict=True)}
            engine.gathering.release(unit)
    engine.raise_failures()
    for policies in activations_of(model):
        policies.remove()
    for block in attached_to(model):  # by policies of a model around this one
        block.detach()
    state.detach()
    for parameter, value in values.items():
        unmanage(parameter, value)  # type: ignore[arg-type]
    running.strike_off(model)
    device_room.strike_off(model)
    if state.optimizer is not None:
        state.optimizer.retire()
