"""The engine of one sharded model: what happens to which units as a pass goes from site to site.

    forward    | s0 | s1 | s2 |                    compute
    fetch   | s0 | s1 | s2 | s3 |                  weights: update, disk, host, device, gather, ahead of use
    backward                    | s2 | s1 | s0 |
    reduce                           | s2 | s1 | s0 |

Fetching follows the order of the last pass. A unit is released when its forward is over, fetched again before
its backward, and released once another site's backward has begun, which is when nothing can still read it. A
site with other sites inside (the root) stays gathered until the backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.tiers.lane import Lane
from unbounded.zero import hooks
from unbounded.zero.collectives import Ranks
from unbounded.zero.reduction import Reduction
from unbounded.zero.schedule import Schedule
from unbounded.zero.unit import Unit, WeightState, holds_storage


@dataclass(eq=False)
class Stop:
    """A site at run time: where a pass stops to have its units gathered."""

    index: int
    name: str
    inner: bool
    units: Sequence[Unit]


class Engine:
    """Gathers and releases; `reduction` takes the gradients from here, `updates` the step."""

    def __init__(
        self,
        stops: Sequence[Stop],
        *,
        ranks: Ranks,
        device: torch.device,
        fetch_lane: Lane,
        reduction: Reduction,
        prefetch_units: int,
        defer_reduction: bool,
        cast_inputs: torch.dtype | None,
    ) -> None:
        self.stops, self.device, self.prefetch_units = stops, device, prefetch_units
        self.ranks = ranks
        self.fetch_ranks = ranks.lane()
        self.fetch_lane, self.reduction = fetch_lane, reduction
        self.defer_reduction, self.cast_inputs = defer_reduction, cast_inputs
        self.units = [unit for stop in stops for unit in stop.units]
        order = [stop.index for stop in stops]
        self.forward = Schedule(order)
        self.backward = Schedule(order[:1] + order[:0:-1])
        self.on_complete: Callable[[Unit], None] | None = None  # called when a unit's gradient is final
        self.collecting = False
        self._behind: Stop | None = None  # the site whose backward is running
        self._in_backward = False
        self._depth = 0
        self._evaluating = False
        self._released = torch.cuda.Event() if device.type == "cuda" else None
        self._no_sync = False
        for unit in self.units:
            unit.keeper = self

    # -- passes ----------------------------------------------------------------------------------------------------

    def before_forward(self, site: int) -> None:
        """A site's forward begins, or is recomputed inside a backward."""
        stop = self.stops[site]
        if hooks.in_backward():
            self.before_backward(stop)
        else:
            if self._in_backward:  # the last backward ended in an exception
                self._end_backward()
            if site == 0:
                self._begin_forward()
            self._visit(stop, self.forward)
            self._count(stop.units)
        for unit in stop.units:
            unit.swap_in()

    def after_forward(self, site: int, outputs: Any) -> None:
        """A site's forward is over: placeholders return, and the backward's start is marked on the outputs."""
        stop = self.stops[site]
        for unit in stop.units:
            unit.swap_out()
        if hooks.in_backward():
            return
        backward_follows = torch.is_grad_enabled() and self._watch_outputs(stop, outputs)
        if site == 0:
            for passed in self.forward.end():
                self._pass_by(self.stops[passed], self.forward)
        if not (backward_follows and stop.inner):
            for unit in stop.units:
                self.release(unit)

    def before_backward(self, stop: Stop) -> None:
        """The backward reaches a site, or its forward is recomputed there."""
        if not self._in_backward:
            self._begin_backward()
        behind, self._behind = self._behind, stop
        if behind is not None and behind is not stop and not behind.inner:
            self._leave(behind)
        if behind is not stop:
            self._visit(stop, self.backward)
        else:
            self._gather(stop.units)

    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """One autograd node of `unit` has all its gradients: called once for every use in a forward."""
        unit.fires += 1
        with torch.no_grad():
            self.reduction.collect(unit, gradients, defer=self.defer_reduction or self._no_sync)
        if self._behind is None or unit not in self._behind.units:
            self._release_if_done(unit)
        if self.on_complete is not None and unit.fires == unit.calls and not self._no_sync:
            self.on_complete(unit)

    def _begin_forward(self) -> None:
        self.settle()
        self._evaluating = not torch.is_grad_enabled()
        self.forward.begin()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.backward.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._in_backward, self._behind = False, None
        for passed in self.backward.end():
            self._pass_by(self.stops[passed], self.backward)
        if self.ranks.size == 1:
            self.forward.adopt()
            self.backward.adopt()
        self.settle()

    def _visit(self, stop: Stop, schedule: Schedule) -> None:
        """Gathers a site's units, with the collectives of sites this rank passed over before it."""
        for passed in schedule.visit(stop.index):
            self._pass_by(self.stops[passed], schedule)
        self._gather(stop.units, schedule.upcoming(self.prefetch_units))

    def _gather(self, units: Sequence[Unit], upcoming: Sequence[int] = ()) -> None:
        for unit in units:
            self.request(unit)
        for index in upcoming:
            for unit in self.stops[index].units:
                self.request(unit)
        for unit in units:
            self.wait(unit)

    def _pass_by(self, stop: Stop, schedule: Schedule) -> None:
        """Takes part in the collectives of a site that only other ranks run."""
        if self.ranks.size == 1:
            return
        for unit in stop.units:
            if not unit.resident or unit.state is not WeightState.GATHERED:
                self.request(unit)
        if schedule is self.backward and not (self.defer_reduction or self._no_sync):
            for unit in stop.units:
                if unit.trainable and unit.fires == 0:
                    self.reduction.join(unit)
        if not stop.inner:
            for unit in stop.units:
                self.release(unit)

    def _watch_outputs(self, stop: Stop, outputs: Any) -> bool:
        """Marks the start of the backward on what the site returned; says whether there will be one."""
        watched = False
        for tensor in hooks.find_tensors(outputs):
            if any(holds_storage(tensor, unit) for unit in stop.units):
                for unit in stop.units:  # a parameter is on its way out of its module: keep it readable
                    unit.held = True
            if tensor.requires_grad:
                watched = True
                tensor.register_hook(lambda _, stop=stop: self.before_backward(stop))
        if not watched and any(unit.trainable for unit in stop.units) and outputs is not None:
            for unit in stop.units:  # the outputs are hidden from us, so the backward may come unannounced
                unit.held = True
        return watched

    def _leave(self, stop: Stop) -> None:
        for unit in stop.units:
            self._release_if_done(unit)

    def _release_if_done(self, unit: Unit) -> None:
        if not unit.trainable or unit.fires >= unit.calls:
            self.release(unit)

    def _count(self, units: Sequence[Unit]) -> None:
        if not self._evaluating:
            for unit in units:
                unit.calls += 1

    # -- weights ---------------------------------------------------------------------------------------------------

    def request(self, unit: Unit) -> None:
        """Starts fetching a unit's weights unless they are there or on their way."""
        if unit.state is WeightState.RELEASED:
            unit.state = WeightState.FETCHING
            unit.handle = self.fetch_lane.submit(self._fetch, unit)

    def wait(self, unit: Unit) -> None:
        """Returns when the current stream may read the unit's weights."""
        if unit.state is WeightState.FETCHING:
            assert unit.handle is not None
            unit.handle.wait()
            unit.state, unit.handle = WeightState.GATHERED, None

    def release(self, unit: Unit) -> None:
        """Frees the bytes of a unit's gathered weights, unless it is resident or held."""
        if unit.resident or unit.held or unit.state is WeightState.RELEASED:
            return
        self.wait(unit)
        if self._released is not None:
            self._released.record()
        unit.deallocate()
        unit.state = WeightState.RELEASED

    def settle(self) -> None:
        """Between passes: releases whatever is still gathered."""
        for unit in self.units:
            unit.held = False
            self.release(unit)

    def borrow(self, unit: Unit) -> None:
        """Gathers a unit for a computation outside its site's forward, until the pass is over."""
        if unit.state is not WeightState.GATHERED and not self._running() and self._needs_peers(unit):
            raise StateError(
                f"the parameters of unit {unit.name!r} are partitioned over {self.ranks.size} ranks and not gathered "
                "outside a forward. Read or change them inside `with unbounded.full_params(model):` on every rank."
            )
        if not hooks.in_backward():
            self._count([unit] if torch.is_grad_enabled() and unit.trainable else [])
        self._gather([unit])
        unit.held = True

    def invalidate(self, unit: Unit) -> None:
        """The unit's owned weights are being updated: what was gathered from them is stale."""
        if unit.resident:
            unit.state = WeightState.RELEASED
        else:
            unit.held = False
            self.release(unit)

    def _fetch(self, unit: Unit) -> None:
        """Runs in the fetch lane."""
        if unit.update is not None:
            unit.update.wait()
        unit.allocate()
        if self._released is not None:
            torch.cuda.current_stream().wait_event(self._released)
        if unit.resident:
            if self._needs_peers(unit):
                self.fetch_ranks.gather(unit.fill, unit.owned_part().clone(), unit.name)
        elif self._needs_peers(unit):
            shard = unit.weights.direct
            if shard is None or shard.device != self.device:
                shard = torch.empty(unit.weights.numel, dtype=unit.dtype, device=self.device)
                unit.weights.fetch(shard)
            self.fetch_ranks.gather(unit.fill, shard, unit.name)
        else:
            unit.weights.fetch(unit.fill)

    def _needs_peers(self, unit: Unit) -> bool:
        return unit.owned != (0, unit.layout.numel)

    def _running(self) -> bool:
        return self._in_backward or self.forward._active

    # -- gradients -------------------------------------------------------------------------------------------------

    def read_gradient(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A parameter's gradient where this rank holds it whole, in the accumulation's own dtype."""
        gradient = unit.gradient
        if not unit.trainable or not (gradient.present or unit.unreduced is not None) or not unit.used[index]:
            return None
        name = unit.layout.slots[index].name
        whole = unit.owned == (0, unit.layout.numel) and unit.unreduced is None
        if not whole or gradient.consumed or gradient.array is None or gradient.array.direct is None:
            raise StateError(
                f"the gradient of {name!r} is not held whole by this rank (partitioned, kept on {gradient.tier}, or "
                "already used), so .grad cannot give it. Use optimizer.clip_grad_norm_ to clip and "
                "optimizer.zero_grad to clear."
            )
        gradient.wait()
        return unit.slot_views(gradient.array.direct)[index]

    def drop_gradient(self, unit: Unit, index: int) -> None:
        """`p.grad = None` for one parameter."""
        if unit.gradient.present and unit.gradient.array is not None and unit.gradient.array.direct is not None:
            unit.gradient.wait()
            if unit.owned == (0, unit.layout.numel):
                unit.slot_views(unit.gradient.array.direct)[index].zero_()
        unit.used[index] = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up whole on every rank and reduced by the first backward outside."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    # -- inputs ----------------------------------------------------------------------------------------------------

    def adapt_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The root's inputs on the device, floats in the compute dtype where the plan lowered it."""

        def adapt(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device != self.device and tensor.device.type != "meta":
                tensor = tensor.to(self.device, non_blocking=True)
            if self.cast_inputs is not None and tensor.dtype == torch.float32:
                tensor = tensor.to(self.cast_inputs)
            return tensor

        return pytree.tree_map_only(torch.Tensor, adapt, (args, kwargs))
