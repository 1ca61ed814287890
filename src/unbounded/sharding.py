"""The front door: a model, an optimizer and a plan become a running engine.

`shard` checks what it was given before it touches anything, resolves every open choice, and leaves the user's
objects in place: the same module with removable hooks, the same Parameter objects, the same param groups.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unbounded.activations.activations import Activations, attach_policies
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.choice import Blocks, choose_policies, pick_blocks
from unbounded.activations.headroom import LIMIT_PART, DeviceMeter, Headroom
from unbounded.activations.promise import DevicePromise, promise_device
from unbounded.activations.shelf import Shelf
from unbounded.activations.tiled.feedforward import Sizes, find_feed_forwards, pick_feed_forwards
from unbounded.activations.tiled.heads import DeferredHeads
from unbounded.errors import BudgetError, PlanError, StateError
from unbounded.native.host_memory import available_bytes
from unbounded.optim.book import RuleBook
from unbounded.optim.joined import JoinedOptimizer
from unbounded.optim.recognition import unwrap
from unbounded.optim.rules import NativeRule
from unbounded.parallel.applied import Applied, take_parts
from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.pipeline.runner import Loss, Pipeline
from unbounded.parallel.pipeline.stage_exchange import sum_among
from unbounded.parallel.pipeline.stages import cut_model
from unbounded.parallel.tensor.vocabulary import HeadPart
from unbounded.planner.plan import Placement, Plan
from unbounded.ranks.cut import Cut
from unbounded.ranks.mesh import Axes
from unbounded.ranks.wire import Wire
from unbounded.tiers.room import FreeRoom, TierRoom
from unbounded.tiers.tiers import Tiers
from unbounded.weights.grafts import Grafts
from unbounded.weights.pretrained import install_weights
from unbounded.zero.full_values import full_values
from unbounded.zero.gradients.copies import sum_copies
from unbounded.zero.parameters.parameter import unmanage
from unbounded.zero.parameters.tiles import has_tiles, hide_wholes, tile_to_fit
from unbounded.zero.setup.admission import admit, common_precision, compute_device
from unbounded.zero.setup.assembly import Assembly, Entries, Fill, Sharded
from unbounded.zero.setup.blueprint import DTYPES, Holdings, find_specs, plan_units
from unbounded.zero.setup.initial import Installer, install_model
from unbounded.zero.setup.meta import ModuleFill
from unbounded.zero.sites import find_members, find_sites
from unbounded.zero.step.balancer import Balancer
from unbounded.zero.step.optimizer import ShardedOptimizer
from unbounded.zero.step.relocation import Relocation

_sharded: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()
_expected: weakref.WeakKeyDictionary[nn.Module, os.PathLike[str]] = weakref.WeakKeyDictionary()
_shelves: weakref.WeakKeyDictionary[nn.Module, Shelf] = weakref.WeakKeyDictionary()
_PARTS = "_unbounded_parts"  # an attribute of the model, which they hold: a table of ours would keep it alive
_promises: weakref.WeakKeyDictionary[nn.Module, DevicePromise] = weakref.WeakKeyDictionary()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: str | Plan | Mapping[str, Any] = "auto",
    *,
    weights: str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """All ranks must call this. Places the states of `model` and `optimizer` and returns them ready to train.

    The model is changed in place and returned; the optimizer returned is a `torch.optim.Optimizer` over the same
    param groups (None where none was given); several optimizers, Muon for matrices and AdamW for the rest, become one
    that steps them all. `plan` is "auto", a `Plan`, or a dict of its fields. `weights` is a
    folder of safetensors that is streamed into a model on the meta device. `mesh` gives the axes of the job (data,
    tensor, pipeline), where the plan's sizes shall not make them. Where a launcher such as torchrun started this
    process among others and there is no process group yet, one is made.
    """
    optimizer = unwrap(optimizer) if optimizer is not None else None
    admitted = admit(model, optimizer, plan, mesh=mesh, is_known=model in _sharded)
    axes, device = admitted.axes, admitted.device
    is_cut = max(axes.tensor.size, axes.pipeline.size, axes.context.size) > 1
    if is_cut:
        _refuse_tiles(model)
    parts = take_parts(model, optimizer, admitted.plan, axes, device)
    open_plan = _close_activations(model, admitted.plan, device)
    if weights is None:
        weights = next((_expected[part] for part in model.modules() if part in _expected), None)
    fill = _choose_fill(model, optimizer, weights, device, parts)
    lowered = DTYPES[open_plan.precision] if open_plan.precision is not None else None
    if not is_cut:
        tile_to_fit(model, open_plan.device_bytes)
    sites = find_sites(model, with_tiles=True)
    holdings = Holdings(parts.cuts, parts.uncounted)
    groups = {id(parts.replaced[key]) if key in parts.replaced else key: g for key, g in admitted.groups.items()}
    book = RuleBook(optimizer, open_plan.optimizer_format) if optimizer is not None else None
    specs = find_specs(sites, groups, axes.data.size, lowered, holdings, book)
    promise = _promise(axes, device, open_plan.device_bytes)
    resolved = replace(open_plan, precision=open_plan.precision or common_precision(model))
    blueprint = plan_units(specs, resolved, axes.data, device, world_size=axes.world.size)
    cast_inputs = lowered if lowered != torch.float32 else None
    hide_wholes(model, optimizer.state if optimizer is not None else None, device, lowered)
    with _lifted_policies(model):
        state = Assembly(model, sites, blueprint, axes, device).build(optimizer, fill, cast_inputs)
        _sharded[model], model.__dict__[_PARTS] = state, parts
        parts.attach()
        state.add_detach(partial(_detach_parts, weakref.ref(model)))
        if parts.hollow is not None:
            parts.hollow.answer = lambda *call: pipeline(model).answer(*call)
        if promise is not None:
            _promises[model] = promise
            state.add_detach(promise.attach(model, partial(_device_states, state.tiers)))
    if blueprint.plan.activations is not None:
        checkpoint_activations(model, blueprint.plan.activations)
    state.add_detach(DeferredHeads(model, device_bytes=blueprint.plan.device_bytes, cut=parts.heads).remove)
    for member in optimizer.members if isinstance(optimizer, JoinedOptimizer) else [optimizer] if optimizer else []:
        state.add_detach(member.register_step_pre_hook(_refuse_old_optimizer).remove)
    if optimizer is not None and _may_balance(admitted.plan, state):
        state.add_detach(_balance(model, state))
    if optimizer is not None and not hasattr(model, "peft_config"):
        state.add_detach(_refuse_late_adapters(model))
    return model, state.optimizer  # type: ignore[return-value]


def _refuse_tiles(model: nn.Module) -> None:
    tile_to_fit(model, None)  # takes those off that a failed call made for a budget
    if has_tiles(model):
        raise PlanError(
            "layers of the model are tiled, and the job has a tensor, pipeline or context axis, which cuts the model "
            "too. Leave out unbounded.tile: a tensor axis makes large layers smaller."
        )


def _detach_parts(held: weakref.ref[nn.Module]) -> None:
    model = held()
    if model is not None:
        model.__dict__.pop(_PARTS).detach()


def _refuse_old_optimizer(*_: Any) -> None:
    raise StateError(
        "this optimizer was given to `shard`, which keeps its states now, so its own step would train nothing. Use the "
        "optimizer that `shard` returned: model, optimizer = unbounded.shard(model, optimizer)."
    )


def _refuse_late_adapters(model: nn.Module) -> Callable[[], None]:
    """Has the next forward refuse adapters that peft puts into a model whose optimizer does not know them."""

    def check(module: nn.Module, _: Any) -> None:
        if hasattr(module, "peft_config"):
            raise StateError(
                "adapters were put into this model after `shard`, so its optimizer does not train them. Call "
                "get_peft_model first, then make the optimizer and call `shard` with both."
            )

    return model.register_forward_pre_hook(check).remove


def _promise(axes: Axes, device: torch.device, device_bytes: int | None) -> DevicePromise | None:
    """All ranks must call this. The promise of a budget for a GPU; one that a rank cannot keep is everybody's error."""
    if device.type != "cuda" or device_bytes is None:
        return None
    promise, error = None, None
    try:
        promise = promise_device(device, device_bytes)
    except BudgetError as caught:
        error = caught
    axes.world.agree(error, what="the device budgets")
    return promise


def sharded(model: nn.Module) -> Sharded:
    """What runs a sharded model, whose last forward may have been broken off."""
    try:
        state = _sharded[model]
    except KeyError:
        raise StateError("this model is not sharded. Call unbounded.shard(model, optimizer) first.") from None
    state.engine.recover()
    state.engine.lending.snapshots.settle()
    return state


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has taken this model."""
    return model in _sharded


def expect_weights(model: nn.Module, folder: os.PathLike[str]) -> None:
    """Has `shard` stream the safetensors in `folder` into this model, or into one that wraps it."""
    _expected[model] = folder


def cut_head(model: nn.Module) -> HeadPart | None:
    """This rank's part of the vocabulary, where a tensor axis cuts the one head of a sharded model."""
    parts = model.__dict__.get(_PARTS)
    return next(iter(parts.heads.values())) if parts is not None and len(parts.heads) == 1 else None


def find_model(parameter: nn.Parameter) -> nn.Module | None:
    """The sharded model that a parameter belongs to; None for one that is not sharded."""
    unit = getattr(parameter, "_unit", None)
    return next((model for model, state in _sharded.items() if unit in state.engine.units), None)


def checkpoint_activations(
    model: nn.Module,
    policy: Placement = "recompute",
    blocks: Blocks | None = None,
    *,
    tiled: str | Sequence[str] | None = "auto",
) -> Activations:
    """Chooses what a block keeps between its forward and its backward; what it returns has a `remove`.

    "keep" keeps everything, "recompute" only the block's inputs, "host" not even those: they go to host memory and
    come back. "auto" takes the first of these that a GPU has room for, in every forward anew; on a CPU it keeps.
    `policy` is one for all blocks, or (block pattern, policy) pairs. The blocks are the repeated ones that `shard`
    finds, or the submodules that `blocks` names, by pattern or by themselves. Works on any model, sharded or not,
    before `shard` or after. Results are those of "keep", bit by bit, where a block may run twice: BatchNorm counts a
    forward that is recomputed twice, as under `torch.utils.checkpoint`, so "auto" keeps such blocks.

    Long sequences: feed-forward layers of blocks that run again go over tiles of tokens where they would otherwise take
    a large part of the device. Those of Hugging Face models are found; `tiled` names others by patterns, or None. Such
    a layer must treat every token alone, and its results are those of the whole layer to the dtype's rounding.
    """
    found = find_blocks(model) if blocks is None else pick_blocks(model, blocks)
    policies = choose_policies(policy, list(found))
    if not found:
        raise PlanError("the model has no repeated blocks to checkpoint. Name its blocks with blocks=.")
    if "auto" in policies.values():
        device = compute_device(find_members(model))
        policies = {name: _close_policy(chosen, device) for name, chosen in policies.items()}
    layers = _find_feed_forwards(found, tiled)
    sizes = Sizes.within(_device_limit(model))
    return attach_policies(model, found, policies, _shelf(model), partial(_make_headroom, model), layers, sizes)


def _find_feed_forwards(
    blocks: Mapping[str, nn.Module], tiled: str | Sequence[str] | None
) -> Mapping[str, Sequence[nn.Module]]:
    if tiled is None:
        return {}
    if tiled == "auto":
        return {name: find_feed_forwards(block) for name, block in blocks.items()}
    return pick_feed_forwards(blocks.items(), (tiled,) if isinstance(tiled, str) else tuple(tiled))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model, by name."""
    return {
        site.name: site.module
        for site in find_sites(model)
        if site.name and next(site.module.children(), None) is not None
    }


def pipeline(
    model: nn.Module, loss: Loss | None = None, *, targets: Sequence[str] = (), reduction: str = "mean"
) -> Pipeline:
    """All ranks must call this. What runs the batches of a model that was sharded with a pipeline axis.

    Called with a batch it runs the forwards and backwards of all micro-batches and returns the batch's loss, the same
    on every rank; `optimizer.step()` follows as usual. The loss is the model's own (`labels` in the batch), or
    `loss(output, batch)` of what the model returns; `targets` names what in the batch is for `loss` alone. The losses
    of micro-batches are averaged, or added up with reduction="sum". On a model without a pipeline axis it does the same
    on one stage.
    """
    if reduction not in ("mean", "sum"):
        raise PlanError(f'reduction is {reduction!r}. Choose "mean" or "sum".')
    state = sharded(model)
    axes, parts = state.engine.axes, model.__dict__[_PARTS]
    wire = Wire(axes.pipeline)

    def add_up() -> None:
        for ranks, parameters in parts.copies:
            sum_copies(parameters, lambda tensor: sum_among(tensor, ranks, wire))  # noqa: B023

    hollow = parts.hollow or HollowModel(model, cut_model(model, 1, 1), axes.pipeline)
    return Pipeline(
        model,
        hollow,
        axes.pipeline,
        state.engine.device,
        schedule=state.plan.schedule or "1f1b",
        num_micros=state.plan.microbatches if axes.pipeline.size > 1 else 1,
        trainer=state.optimizer,
        sum_copies=add_up,
        loss=loss,
        targets=targets,
        reduction=reduction,
    )


def unshard(model: nn.Module) -> nn.Module:
    """All ranks must call this. Gives the model its whole parameters back as plain ones, and frees all that ran it.

    The values come to the device that the model ran on. The sharded optimizer is of no use afterwards; save what it
    knows first.
    """
    state = sharded(model)
    engine = state.engine
    engine.refuse_inside_full_params("unbounded.unshard")
    if any(axis.size > 1 for axis in engine.axes.model) or has_tiles(model):
        raise StateError(
            "unshard joins what the data axis has partitioned, but this model is also cut by tiles or by the tensor or "
            "pipeline axis. Use unbounded.export(folder, model) and load the folder into a new model."
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
    for block in attached_to(model):
        block.detach()
    state.detach()
    for parameter, value in values.items():
        unmanage(parameter, value)  # type: ignore[arg-type]
    for held in (_sharded, _shelves, _promises):
        held.pop(model, None)  # type: ignore[attr-defined]
    return model


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """All ranks must enter this. Inside, every parameter holds its full value; what is written to it is kept."""
    state = sharded(model)
    if state.optimizer is not None:
        state.optimizer.wait()
    with torch.no_grad(), full_values(state.engine):
        yield


def _close_activations(model: nn.Module, plan: Plan, device: torch.device) -> Plan:
    """The plan with a policy for every block by name, unless the model came with some."""
    if attached_to(model):
        if plan.activations is None:
            return plan
        raise PlanError(
            f"the plan has activations={plan.activations!r}, but checkpoint_activations was called on this model. "
            "Leave out one of them."
        )
    # Backwards in halves need everything kept.
    unsaid = "keep" if plan.schedule == "zero_bubble" else "auto"
    policies = choose_policies(plan.activations or unsaid, list(find_blocks(model)))
    if not policies and plan.activations is not None:
        warnings.warn(f"activations={plan.activations!r}, but the model has no repeated blocks.", stacklevel=3)
    closed = tuple((name, _close_policy(policy, device)) for name, policy in policies.items())
    return replace(plan, activations=closed or None)


def _close_policy(policy: str, device: torch.device) -> str:
    """Only a GPU says how much of it is taken, which "auto" asks before every block."""
    return "keep" if policy == "auto" and device.type != "cuda" else policy


def _make_headroom(model: nn.Module, num_blocks: int) -> Headroom:
    """Within the device's budget; a model that is not sharded has the whole device."""
    state, device = _sharded.get(model), compute_device(find_members(model))
    promise = _promises.get(model)
    headroom = Headroom(
        DeviceMeter(device),
        int(_device_limit(model) * LIMIT_PART),
        num_blocks,
        has_host_room=_shelf(model).buffers.has_room,
        trim_host=_shelf(model).buffers.trim,
        growth_bytes=state.engine.gradients.growth_bytes if state is not None else lambda: 0,
        renew_limit=(lambda: int(promise.cap_bytes * LIMIT_PART)) if promise is not None else None,
    )
    if promise is not None:
        promise.on_shortage = headroom.note_shortage
    return headroom


def _may_balance(plan: Plan, state: Sharded) -> bool:
    """Whether the plan lets states move and has no place for them, ranks may decide alone, and lanes can carry them."""
    is_native = all(isinstance(unit.rule, NativeRule) for unit in state.engine.units if unit.rule is not None)
    is_own = state.engine.ranks.size == 1 or state.plan.stage > 0
    is_open = plan.move_states and plan.optimizer is None and plan.gradients is None
    return state.engine.device.type == "cuda" and is_open and is_own and is_native


def _balance(model: nn.Module, state: Sharded) -> Callable[[], None]:
    """Has states and activations share the device, once steps have been seen; the returned function ends it."""
    assert state.optimizer is not None
    headroom = next((block.headroom for block in attached_to(model) if block.headroom is not None), None)
    meter, limit = DeviceMeter(state.engine.device), int(_device_limit(model) * LIMIT_PART)
    balancer = Balancer(
        state.optimizer,
        Relocation(state.engine, state.tiers, state.bounce),
        free_bytes=lambda: (limit if headroom is None else headroom.limit_bytes) - meter.peak_bytes(),
        kept_bytes=lambda: 0 if headroom is None else headroom.kept_bytes,
        forget=meter.forget_peak,
    )
    if headroom is not None:
        headroom.make_room = balancer.make_room
    return balancer.attach(model)


def _device_states(tiers: Tiers) -> int:
    return tiers.use()["device"].used_bytes


def _device_limit(model: nn.Module) -> int:
    """The device's budget; a model that is not sharded has the whole device."""
    state, device = _sharded.get(model), compute_device(find_members(model))
    budget = state.tiers.budgets["device"] if state is not None else None
    if budget is not None:
        return budget
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_bytes()


@contextmanager
def _lifted_policies(model: nn.Module) -> Iterator[None]:
    """Takes activation policies off while hooks are attached: they belong around those. Their room is then ours."""
    blocks = attached_to(model)
    for block in blocks:
        block.detach()
    try:
        yield
        _shelves.pop(model, None)
        open_blocks = [block for block in blocks if block.headroom is not None]
        headroom = _make_headroom(model, len(open_blocks)) if open_blocks else None
        for block in blocks:
            block.shelf, block.headroom = _shelf(model), headroom if block in open_blocks else None
            for layer in block.feed_forwards:
                layer.sizes = Sizes.within(_device_limit(model))
    finally:
        for block in blocks:
            block.attach()


def _shelf(model: nn.Module) -> Shelf:
    """Where activations of a model are kept on the host: in its host tier, or in what is free."""
    if model not in _shelves:
        state = _sharded.get(model)
        _shelves[model] = Shelf(TierRoom(state.tiers) if state is not None else FreeRoom())
    return _shelves[model]


def _install_weights(
    model: nn.Module,
    weights: str | os.PathLike[str],
    device: torch.device,
    cuts: Mapping[int, Cut],
    absent: Mapping[int, Mapping[str, torch.Tensor]],
    entries: Entries,
    installer: Installer,
) -> None:
    install_weights(model, entries, installer, weights, device, cuts=cuts, absent=absent)


def _choose_fill(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    weights: str | os.PathLike[str] | None,
    device: torch.device,
    parts: Applied,
) -> Fill:
    """Where the first values come from: a folder of safetensors, the modules' own initialisation, or the model."""
    absent = parts.hollow.absent() if parts.hollow is not None else {}
    if weights is not None:
        return partial(_install_weights, model, weights, device, parts.cuts, absent)
    states = optimizer.state if optimizer is not None else {}
    carried = (lambda parameter: states.pop(parameter, {})) if states else None
    if any(parameter.is_meta for parameter in model.parameters()):
        meta = ModuleFill(model, device, Grafts(model), cuts=parts.cuts, absent=absent, carried=carried)
        meta.check()
        return meta.install
    return lambda entries, installer: install_model(entries, installer, carried)
