"""Who gets the memory of device and host besides a model's states: budgets, activations, states that move.

A model that is not sharded has the whole device, and whatever is free on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from unbounded.activations.checkpointed import attached_to
from unbounded.activations.headroom import DeviceMeter, Headroom
from unbounded.activations.offload.shelf import Shelf
from unbounded.activations.promise import DevicePromise, promise_device
from unbounded.activations.read_room import ReadRoom
from unbounded.errors import BudgetError
from unbounded.native.host_memory import available_bytes
from unbounded.optim.rules import NativeRule
from unbounded.planner.plan import Plan
from unbounded.planner.sizes import allocatable_bytes
from unbounded.ranks.mesh import Axes
from unbounded.sharding.running import find_sharded
from unbounded.tiers.room import FreeRoom, TierRoom
from unbounded.tiers.tiers import Tiers
from unbounded.zero.members import find_members
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.saved import save_by_name
from unbounded.zero.setup.admission import compute_device
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.step.balancer import Balancer
from unbounded.zero.step.relocation import Relocation

_shelves: weakref.WeakKeyDictionary[nn.Module, Shelf] = weakref.WeakKeyDictionary()
_promises: weakref.WeakKeyDictionary[nn.Module, DevicePromise] = weakref.WeakKeyDictionary()


def promise_budget(axes: Axes, device: torch.device, device_bytes: int | None) -> DevicePromise | None:
    """All ranks must call this. The promise of a GPU's budget; if one rank cannot keep it, all raise."""
    if device.type != "cuda" or device_bytes is None:
        return None
    promise, error = None, None
    try:
        promise = promise_device(device, device_bytes)
    except BudgetError as caught:
        error = caught
    axes.world.agree(error, what="the device budgets")
    return promise


def keep_promise(model: nn.Module, state: Sharded, promise: DevicePromise) -> None:
    """From now on the allocator stays within the budget of `model`, until it is detached."""
    _promises[model] = promise
    state.add_detach(promise.attach(model, partial(_device_states, state.tiers)))


def _device_states(tiers: Tiers) -> int:
    return tiers.use()["device"].used_bytes


def device_limit(model: nn.Module) -> int:
    """The device's budget; a model that is not sharded has the whole device."""
    state, device = find_sharded(model), compute_device(find_members(model))
    budget = state.tiers.budgets["device"] if state is not None else None
    if budget is not None:
        return budget
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_bytes()


def make_headroom(model: nn.Module, num_blocks: int) -> Headroom:
    """Within the device's budget; a model that is not sharded has the whole device."""
    state, device = find_sharded(model), compute_device(find_members(model))
    promise, limit = _promises.get(model), allocation_limit(model)
    headroom = Headroom(
        DeviceMeter(device),
        limit(),
        num_blocks,
        has_host_room=shelf_of(model).buffers.has_room,
        trim_host=shelf_of(model).buffers.trim,
        growth_bytes=state.engine.gradients.growth_bytes if state is not None else lambda: 0,
        gathered_bytes=partial(_gathered, state.engine.gathering) if state is not None else lambda: 0,
        renew_limit=limit,
    )
    if promise is not None:
        promise.on_shortage = headroom.note_shortage
    return headroom


def limit_reads(model: nn.Module, state: Sharded) -> None:
    """Weights on disk are read ahead only where the GPU has room for them."""
    gathering = state.engine.gathering
    if gathering.device.type == "cuda":
        gathering.room = ReadRoom(
            DeviceMeter(gathering.device),
            limit=allocation_limit(model),
            gathered=partial(_gathered, gathering),
        )


def _gathered(gathering: Gathering) -> int:
    return gathering.gathered_bytes


def allocation_limit(model: nn.Module) -> Callable[[], int]:
    """Reads what torch's allocator may give out now. A promised budget also holds what is outside the allocator."""
    if (promise := _promises.get(model)) is not None:
        return partial(_promised, promise)
    whole = allocatable_bytes(device_limit(model))
    return lambda: whole


def _promised(promise: DevicePromise) -> int:
    return allocatable_bytes(promise.cap_bytes)


def shelf_of(model: nn.Module) -> Shelf:
    """Where activations of a model are kept on the host: in its host tier, or in free memory."""
    if model not in _shelves:
        state = find_sharded(model)
        _shelves[model] = Shelf(TierRoom(state.tiers) if state is not None else FreeRoom(), save_by_name)
    return _shelves[model]


def forget_shelf(model: nn.Module) -> None:
    """From now on, activations of `model` are kept where it belongs now: in its host tier once it is sharded."""
    _shelves.pop(model, None)


def strike_off(model: nn.Module) -> None:
    """`model` is no longer sharded."""
    _shelves.pop(model, None)
    _promises.pop(model, None)


def may_balance(plan: Plan, state: Sharded) -> bool:
    """Whether the plan lets states move, ranks may decide alone, and lanes can carry them."""
    is_native = all(isinstance(unit.rule, NativeRule) for unit in state.engine.units if unit.rule is not None)
    is_own = state.engine.ranks.size == 1 or state.plan.stage > 0
    return state.engine.device.type == "cuda" and plan.lets_states_move and is_own and is_native


def balance(model: nn.Module, state: Sharded) -> Callable[[], None]:
    """Lets states and activations share the device, once steps have been seen; the returned function ends it."""
    assert state.optimizer is not None
    headroom = next((block.headroom for block in attached_to(model) if block.headroom is not None), None)
    meter, limit = DeviceMeter(state.engine.device), allocation_limit(model)

    def free_bytes() -> int:
        seen = 0 if headroom is None else headroom.peak_bytes  # the user may reset the meter's
        return limit() - max(meter.peak_bytes(), seen)

    def forget() -> None:
        meter.forget_peak()
        if headroom is not None:
            headroom.peak_bytes = 0

    balancer = Balancer(
        state.optimizer,
        Relocation(state.engine, state.tiers, state.bounce, is_fixed=state.optimizer.updates.drafts.hold),
        free_bytes=free_bytes,
        kept_bytes=lambda: 0 if headroom is None else headroom.kept_bytes,
        forget=forget,
    )
    if headroom is not None:
        headroom.make_room = balancer.make_room
    elif model in _promises:
        _promises[model].on_shortage = balancer.note_shortage
    return balancer.attach(model)
