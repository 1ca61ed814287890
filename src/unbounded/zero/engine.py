"""The engine of one sharded model: what happens to which units as a pass goes from site to site.

    forward    | s0 | s1 | s2 |                    compute
    fetch   | s0 | s1 | s2 | s3 |                  weights: update, disk, host, device, gather, ahead of use
    backward                    | s2 | s1 | s0 |
    reduce                           | s2 | s1 | s0 |

A unit is gathered while anybody has a claim on it: the prefetch takes one for every visit it expects, and the
visit gives it back: at the end of the site's forward, or, in the backward, once another site's has begun, which
is when nothing can still read the weights. A site with other sites inside (the root) keeps its claim until the
backward ends. With several ranks, gathers and reductions are launched in an order all ranks agree on, whatever
their own passes do (see `schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.observe import trace
from unbounded.tiers.lane import Lane
from unbounded.zero import hooks
from unbounded.zero.collectives import Ranks
from unbounded.zero.failures import Failures
from unbounded.zero.reduction import Reduction
from unbounded.zero.schedule import Schedule
from unbounded.zero.unit import Unit, WeightState, holds_storage

# Sites that a rank may keep gathered for later in the pass because others ran them before it did.
KEPT_SITES = 8


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
        count_bytes: Callable[[int], None],
        failures: Failures,
    ) -> None:
        self.stops, self.device, self.prefetch_units = stops, device, prefetch_units
        self.ranks = ranks
        self.fetch_ranks = ranks.lane()
        self.fetch_lane, self.reduction, self.failures = fetch_lane, reduction, failures
        self.defer_reduction, self.cast_inputs = defer_reduction, cast_inputs
        self.units = [unit for stop in stops for unit in stop.units]
        order = [stop.index for stop in stops]
        self.forward = Schedule(order)
        self.backward = Schedule(order[:1] + order[:0:-1])
        self.on_complete: Callable[[Unit], None] | None = None  # called when a unit's gradient is final
        self.collecting = 0  # state dicts being put together
        self.shown = False  # every parameter holds its full value
        self._behind: Stop | None = None  # the site whose backward is running
        self._in_backward = False
        self._evaluating = False
        self._passed: list[Stop] = []  # claimed for this rank but not visited when they were expected
        self._gathered = False  # this rank has joined a gather since the ranks last met
        self._released = torch.cuda.Event() if device.type == "cuda" else None
        self._no_sync = False
        self._computing: AbstractContextManager[None] | None = None
        self._count_bytes = count_bytes
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
                self._abandon_backward()
            if site == 0:
                self._begin_forward()
            self._visit(stop, self.forward)
            if not self._evaluating:
                for unit in stop.units:
                    unit.calls += 1
            self._mark_compute(stop)
        for unit in stop.units:
            unit.swap_in()

    def after_forward(self, site: int, outputs: Any) -> None:
        """A site's forward is over: placeholders return, and the backward's start is marked on the outputs."""
        stop = self.stops[site]
        for unit in stop.units:
            unit.swap_out()
        if hooks.in_backward():
            return
        self._mark_compute(None)
        backward_follows = torch.is_grad_enabled() and self._watch_outputs(stop, outputs)
        if site == 0:
            self._finish(self.forward)
        if not (backward_follows and stop.inner):
            self._drop(stop.units)
        if site == 0:
            self.raise_failures(alone=self._evaluating)

    def before_backward(self, stop: Stop) -> None:
        """The backward reaches a site, or its forward is recomputed there."""
        if not self._in_backward:
            self._begin_backward()
        if stop.inner:  # around the others, and gathered until the backward ends: nobody is left for it
            self._visit(stop, self.backward)
            return
        behind, self._behind = self._behind, stop
        if behind is stop:
            self._gather(stop.units)
            return
        self._mark_compute(None)
        if behind is not None:
            self._leave(behind)
        self._visit(stop, self.backward)
        self._mark_compute(stop)

    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """One autograd node of `unit` has all its gradients: called once for every use in a forward."""
        unit.fires += 1
        complete = unit.fires == unit.calls and not self._no_sync
        with torch.no_grad():
            self.reduction.collect(unit, gradients, complete=complete, defer=self.defer_reduction or self._no_sync)
        if (self._behind is None or unit not in self._behind.units) and unit.late:
            unit.late = False
            self._drop([unit])
        if self.on_complete is not None and complete:
            self.on_complete(unit)

    def _begin_forward(self) -> None:
        self.settle()
        self._evaluating = not torch.is_grad_enabled()
        self.forward.begin()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.backward.begin()
        if not (self.defer_reduction or self._no_sync):
            self.reduction.begin([unit for index in self._backward_order() for unit in self.stops[index].units])
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._mark_compute(None)
        self._in_backward, self._behind = False, None
        self._finish(self.backward)
        if not (self.defer_reduction or self._no_sync):
            self.reduction.end()
        if self.ranks.size == 1:
            self.forward.adopt(keep_all=False)
            self.backward.adopt(keep_all=False)
        self.settle()

    def _abandon_backward(self) -> None:
        self._in_backward, self._behind = False, None
        self.backward.end()
        self.reduction.abandon()
        self.settle()

    def _mark_compute(self, stop: Stop | None) -> None:
        """Ends the compute lane's span and begins that of `stop`. Innermost sites have one: they do not overlap."""
        if self._computing is not None:
            self._computing.__exit__(None, None, None)
            self._computing = None
        if stop is not None and not stop.inner:
            self._computing = trace.device_span("compute", stop.name)
            self._computing.__enter__()

    def _backward_order(self) -> list[int]:
        """Every site once, in the order in which backwards are expected to leave them."""
        seen = dict.fromkeys(reversed([*self.backward.expected]))
        return [*reversed(list(seen)), *(stop.index for stop in self.stops if stop.index not in seen)]

    def _visit(self, stop: Stop, schedule: Schedule) -> None:
        """Claims a site's units and those expected next, and waits for the site's own."""
        passed = schedule.visit(stop.index)
        if passed is None and stop in self._passed:
            self._passed.remove(stop)  # late by the agreed order, and kept for this
        elif passed is None:
            self._claim_alone(stop.units)
        elif self.ranks.size == 1:
            self._forget(passed)
            schedule.skip()
        else:
            self._passed += [self.stops[index] for index in passed]
        for index in schedule.issue(self.prefetch_units):
            self._claim(self.stops[index].units)
        for early in self._passed[:-KEPT_SITES]:
            self._drop(early.units)
        self._passed = self._passed[-KEPT_SITES:]
        self._gather(stop.units)

    def _forget(self, passed: Sequence[int]) -> None:
        for index in passed:
            for unit in self.stops[index].units:
                if unit.claims:
                    self._drop([unit])

    def _finish(self, schedule: Schedule) -> None:
        """Takes part in what the agreed order still holds for other ranks, and keeps nothing for later."""
        rest = schedule.end()
        if self.ranks.size > 1:
            for index in rest:
                self._claim(self.stops[index].units)
                self._drop(self.stops[index].units)
        for stop in self._passed:
            self._drop(stop.units)
        self._passed.clear()

    def _watch_outputs(self, stop: Stop, outputs: Any) -> bool:
        """Marks the start of the backward on what the site returned; says whether there will be one."""
        watched = False
        for tensor in hooks.find_tensors(outputs):
            if any(holds_storage(tensor, unit) for unit in stop.units):
                self._claim(stop.units)  # a parameter is on its way out of its module: keep it readable
            if tensor.requires_grad:
                watched = True
                tensor.register_hook(lambda _, stop=stop: self.before_backward(stop))
        if not watched and any(unit.trainable for unit in stop.units) and outputs is not None:
            self._claim(stop.units)  # the outputs are hidden from us, so the backward may come unannounced
        return watched

    def _leave(self, stop: Stop) -> None:
        """The backward has moved on from a site: nothing reads its weights, unless a gradient is still to come."""
        for unit in stop.units:
            if unit.trainable and unit.fires < unit.calls:
                unit.late = True
            else:
                self._drop([unit])

    # -- weights ---------------------------------------------------------------------------------------------------

    def request(self, unit: Unit) -> None:
        """Starts fetching a unit's weights unless they are there or on their way."""
        if unit.state is WeightState.RELEASED:
            unit.state = WeightState.FETCHING
            self._gathered = self._gathered or self._needs_peers(unit)
            unit.handle = self.fetch_lane.submit(self._fetch, unit)

    def wait(self, unit: Unit) -> None:
        """Returns when the current stream may read the unit's weights."""
        if unit.state is WeightState.FETCHING:
            assert unit.handle is not None
            unit.handle.wait()
            unit.state, unit.handle = WeightState.GATHERED, None

    def release(self, unit: Unit) -> None:
        """Frees the bytes of a unit's gathered weights and every claim on them, unless it is resident."""
        unit.claims, unit.late = 0, False
        if unit.resident or unit.state is WeightState.RELEASED:
            return
        self.wait(unit)
        if self._released is not None:
            self._released.record()
        unit.deallocate()
        unit.state = WeightState.RELEASED
        self._count_bytes(-unit.num_bytes)

    def settle(self) -> None:
        """Between passes: releases whatever is still gathered."""
        self._passed.clear()
        for unit in self.units:
            unit.forget_views()
            self.release(unit)

    def raise_failures(self, *, alone: bool = True) -> None:
        """Raises what failed in fetches: where there was a gather on all ranks, else on this one if `alone`.

        A forward without a gather may be one rank's own. What fails in a part of training waits for the step.
        """
        gathered, self._gathered = self._gathered, False
        if gathered:
            self.failures.meet()
        elif alone:
            self.failures.raise_noted()

    def borrow(self, unit: Unit, *, counted: bool) -> bool:
        """Gathers a unit for a computation outside its site's forward, until the pass is over; whether there is one.

        Inside the model's own code, and in a loss, every rank does the same. A look from outside may be one rank's.
        """
        in_pass = self._in_backward or self.forward.active or hooks.in_module_call()
        is_collective = in_pass or torch.is_grad_enabled()
        if unit.state is WeightState.RELEASED and self._needs_peers(unit) and not is_collective:
            raise StateError(
                f"the parameters of unit {unit.name!r} are partitioned over {self.ranks.size} ranks and not gathered "
                "outside a forward. Read or change them inside `with unbounded.full_params(model):` on every rank."
            )
        if counted and not hooks.in_backward():
            unit.calls += 1
        self._claim_alone([unit])
        self._gather([unit])
        return in_pass

    def invalidate(self, unit: Unit) -> None:
        """The unit's owned weights are being updated: what was gathered from them is stale."""
        if unit.resident:
            self.wait(unit)  # a gather under way still reads the old ones
            unit.state = WeightState.RELEASED
        else:
            self.release(unit)

    def _claim(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.claims += 1
            self.request(unit)

    def _claim_alone(self, units: Sequence[Unit]) -> None:
        """Claims units outside the agreed order, after making sure that every rank is about to do the same."""
        for unit in units:
            if unit.state is WeightState.RELEASED and self._needs_peers(unit):
                self.ranks.rendezvous(unit.name)
        self._claim(units)

    def _drop(self, units: Sequence[Unit]) -> None:
        """Gives back one claim on each unit; the last one frees it."""
        for unit in units:
            unit.claims -= 1
            if unit.claims <= 0:
                self.release(unit)

    def _gather(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.request(unit)
        for unit in units:
            self.wait(unit)

    def _fetch(self, unit: Unit) -> None:
        """Runs in the fetch lane. With peers a unit is gathered in any case: they are on their way to it too."""
        with self.failures.noting():
            if unit.update is not None:
                unit.update.wait()
        if not unit.resident:
            unit.allocate()
            self._count_bytes(unit.num_bytes)
        if self._released is not None:
            torch.cuda.current_stream().wait_event(self._released)
        if unit.resident:
            if self._needs_peers(unit):
                self.fetch_ranks.gather(unit.fill, unit.owned_part().clone(), unit.name)
        elif self._needs_peers(unit):
            shard = unit.weights.direct
            if shard is None or shard.device != self.device:
                shard = torch.empty(unit.weights.numel, dtype=unit.dtype, device=self.device)
                self._fetch_owned(unit, shard)
            self.fetch_ranks.gather(unit.fill, shard, unit.name)
        else:
            self._fetch_owned(unit, unit.fill)

    def _fetch_owned(self, unit: Unit, target: torch.Tensor) -> None:
        """Copies are ordered by the lane's stream; a read of the disk is waited for."""
        with self.failures.noting():
            transfer = unit.weights.fetch(target)
            if unit.weights.direct is None:
                transfer.wait()
            return
        target.zero_()  # the read failed: no garbage until the ranks have met

    def _needs_peers(self, unit: Unit) -> bool:
        return unit.owned != (0, unit.layout.numel)

    # -- gradients -------------------------------------------------------------------------------------------------

    def read_gradient(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A parameter's gradient where this rank holds it whole, in the accumulation's own dtype."""
        gradient = unit.gradient
        if not unit.trainable or not unit.used[index]:
            return None
        gradient.wait()
        name = unit.layout.slots[index].name
        whole = unit.owned == (0, unit.layout.numel) and unit.unreduced is None
        if not whole or gradient.consumed or gradient.array is None or gradient.array.direct is None:
            raise StateError(
                f"the gradient of {name!r} is not held whole by this rank (partitioned, kept on {gradient.tier}, or "
                "already used), so .grad cannot give it. Use optimizer.clip_grad_norm_ to clip and "
                "optimizer.zero_grad to clear."
            )
        return unit.slot_views(gradient.array.direct)[index]

    def drop_gradient(self, unit: Unit, index: int) -> None:
        """`p.grad = None` for one parameter."""
        gradient = unit.gradient
        gradient.wait()
        if gradient.present and gradient.array is not None and unit.owned == (0, unit.layout.numel):
            if gradient.array.direct is None:
                raise StateError(
                    f"the gradient of {unit.layout.slots[index].name!r} is kept on disk and cannot be cleared alone. "
                    "Use optimizer.zero_grad()."
                )
            unit.slot_views(gradient.array.direct)[index].zero_()
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
