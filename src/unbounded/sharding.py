"""The front door: a model, an optimizer and a plan become a running engine.

`shard` checks what it was given before it touches anything, resolves every open choice, and leaves the user's
objects in place: the same module with removable hooks, the same Parameter objects, the same param groups.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError, StateError
from unbounded.memory.activations import Activations, attach_policies
from unbounded.memory.checkpointed import attached_to
from unbounded.memory.choice import Blocks, choose_policies, pick_blocks
from unbounded.memory.headroom import LIMIT_PART, DeviceMeter, Headroom
from unbounded.memory.shelf import Shelf
from unbounded.optim.rules import read_rule
from unbounded.planner.plan import Placement, Plan, read_plan
from unbounded.tiers.room import FreeRoom, TierRoom
from unbounded.zero import access
from unbounded.zero.admission import check_model, check_optimizer, common_precision, compute_device
from unbounded.zero.assembly import Assembly, Entries, Fill, Sharded
from unbounded.zero.blueprint import DTYPES, find_specs, plan_units
from unbounded.zero.collectives import Ranks
from unbounded.zero.initial import Installer, install_model
from unbounded.zero.meta import MetaModel
from unbounded.zero.optimizer import ShardedOptimizer
from unbounded.zero.units import find_members, find_sites

_sharded: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()
_shelves: weakref.WeakKeyDictionary[nn.Module, Shelf] = weakref.WeakKeyDictionary()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: str | Plan | Mapping[str, Any] = "auto",
    *,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """All ranks must call this. Places the states of `model` and `optimizer` and returns them ready to train.

    The model is changed in place and returned; the optimizer returned is a `torch.optim.Optimizer` over the same
    param groups (None where none was given). `plan` is "auto", a `Plan`, or a dict of its fields. `weights` is a
    folder of safetensors that is streamed into a model on the meta device.
    """
    ranks = Ranks()
    members = check_model(model, is_known=model in _sharded)
    open_plan = read_plan(plan)
    groups = check_optimizer(optimizer, members)
    device = compute_device(members)
    names = [f"{m.names} {tuple(m.parameter.shape)} {m.parameter.requires_grad}" for m in members]
    ranks.check_same("\n".join(names), "model")
    ranks.check_same(repr(open_plan), "plan")
    open_plan = _close_activations(model, open_plan, device)
    fill = _choose_fill(model, optimizer, weights, device)
    lowered = DTYPES[open_plan.precision] if open_plan.precision is not None else None
    sites = find_sites(model)
    specs = find_specs(sites, groups, ranks.size, lowered)
    for spec in specs:
        if spec.trainable and optimizer is not None:
            spec.rule = read_rule(optimizer, spec.dtype, open_plan.optimizer_format)
    resolved = replace(open_plan, precision=open_plan.precision or common_precision(model))
    blueprint = plan_units(specs, resolved, ranks, device)
    cast_inputs = lowered if lowered != torch.float32 else None
    with _lifted_policies(model):
        state = Assembly(model, sites, blueprint, ranks, device).build(optimizer, fill, cast_inputs)
        _sharded[model] = state
    if blueprint.plan.activations is not None:
        checkpoint_activations(model, blueprint.plan.activations)
    return model, state.optimizer  # type: ignore[return-value]


def sharded(model: nn.Module) -> Sharded:
    """What runs behind a sharded model, whose last forward may have been broken off."""
    try:
        state = _sharded[model]
    except KeyError:
        raise StateError("this model is not sharded. Call unbounded.shard(model, optimizer) first.") from None
    state.engine.recover()
    return state


def checkpoint_activations(
    model: nn.Module, policy: Placement = "recompute", blocks: Blocks | None = None
) -> Activations:
    """Chooses what a block keeps between its forward and its backward; what it returns has a `remove`.

    "keep" keeps everything, "recompute" only the block's inputs, "host" not even those: they go to host memory and
    come back. "auto" takes the first of these that a GPU has room for, in every forward anew; on a CPU it keeps.
    `policy` is one for all blocks, or (block pattern, policy) pairs. The blocks are the repeated ones that `shard`
    finds, or the submodules that `blocks` names, by pattern or by themselves. Works on any model, sharded or not,
    before `shard` or after. Results are those of "keep", bit by bit, where a block may run twice: BatchNorm counts a
    forward that is recomputed twice, as under `torch.utils.checkpoint`, so "auto" keeps such blocks.
    """
    found = find_blocks(model) if blocks is None else pick_blocks(model, blocks)
    policies = choose_policies(policy, list(found))
    if not found:
        raise PlanError("the model has no repeated blocks to checkpoint. Name its blocks with blocks=.")
    if "auto" in policies.values():
        device = compute_device(find_members(model))
        policies = {name: _close_policy(chosen, device) for name, chosen in policies.items()}
    return attach_policies(model, found, policies, _shelf(model), partial(_make_headroom, model))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model, by name."""
    return {
        site.name: site.module
        for site in find_sites(model)
        if site.name and next(site.module.children(), None) is not None
    }


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """All ranks must enter this. Inside, every parameter holds its full value; what is written to it is kept."""
    state = sharded(model)
    if state.optimizer is not None:
        state.optimizer.wait()
    with torch.no_grad(), access.full_values(state.engine, state.rules):
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
    policies = choose_policies(plan.activations or "auto", list(find_blocks(model)))
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
    budget = state.tiers.budgets["device"] if state is not None else None
    limit = budget if budget is not None else torch.cuda.mem_get_info(device)[1]
    return Headroom(
        DeviceMeter(device),
        int(limit * LIMIT_PART),
        num_blocks,
        has_host_room=_shelf(model).buffers.has_room,
        trim_host=_shelf(model).buffers.trim,
        growth_bytes=state.engine.gradient_growth_bytes if state is not None else lambda: 0,
    )


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
    finally:
        for block in blocks:
            block.attach()


def _shelf(model: nn.Module) -> Shelf:
    """Where activations of a model are kept on the host: in its host tier, or in what is free."""
    if model not in _shelves:
        state = _sharded.get(model)
        _shelves[model] = Shelf(TierRoom(state.tiers) if state is not None else FreeRoom())
    return _shelves[model]


def _choose_fill(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    weights: str | os.PathLike[str] | None,
    device: torch.device,
) -> Fill:
    """Where the first values come from: a folder of safetensors, the modules' own initialisation, or the model."""
    if weights is not None:
        from unbounded.checkpoint.pretrained import install_weights

        return lambda entries, installer: install_weights(model, entries, installer, weights, device)  # type: ignore[arg-type]
    if any(parameter.is_meta for parameter in model.parameters()):
        meta = MetaModel(model, device)
        meta.check()
        return meta.install
    states = optimizer.state if optimizer is not None else {}

    def fill(entries: Entries, installer: Installer) -> None:
        install_model(entries, installer, (lambda parameter: states.pop(parameter, {})) if states else None)

    return fill
