"""The engine of one sharded model: what happens to which units as a pass goes from site to site.

    forward    | s0 | s1 | s2 |                    compute
    fetch   | s0 | s1 | s2 | s3 |                  weights: update, disk, host, device, gather, ahead of use
    backward                    | s2 | s1 | s0 |
    reduce                           | s2 | s1 | s0 |

A unit is gathered while anybody has a claim on it (`gathering`): the prefetch takes one for every visit it expects, and
the visit gives it back: at the end of the site's forward, or, in the backward, once another site's has begun, which
is when nothing can still read the weights. A site with other sites inside (the root) keeps its claim until the
backward ends. With several ranks, gathers and reductions are launched in an order all ranks agree on, whatever
their own passes do (see `schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unbounded.errors import StateError
from unbounded.observe import trace
from unbounded.zero import hooks
from unbounded.zero.collectives import Ranks
from unbounded.zero.failures import Failures
from unbounded.zero.gathering import Gathering
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
    """Follows the passes: `gathering` brings weights, `reduction` takes the gradients from here, `updates` the step."""

    def __init__(
        self,
        stops: Sequence[Stop],
        *,
        ranks: Ranks,
        device: torch.device,
        gathering: Gathering,
        reduction: Reduction,
        prefetch_units: int,
        defer_reduction: bool,
        cast_inputs: torch.dtype | None,
        failures: Failures,
    ) -> None:
        self.stops, self.device, self.prefetch_units = stops, device, prefetch_units
        self.ranks = ranks
        self.gathering, self.reduction, self.failures = gathering, reduction, failures
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
        self._is_differentiable = False  # the backward that runs may be differentiated itself: weights stay
        self._evaluating = False
        self._unannounced: set[Unit] = set()  # whose backward will not be seen: they stay until one ends
        self._passed: list[Stop] = []  # claimed for this rank but not visited when they were expected
        self._no_sync = False
        self._computing: AbstractContextManager[None] | None = None
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

    def after_forward(self, site: int, outputs: Any, kept: Any) -> None:
        """A site's forward is over: placeholders return, and the backward's start is marked on the outputs.

        `kept` are tensors of the graph that its modules keep for later: a backward may begin there too.
        """
        stop = self.stops[site]
        for unit in stop.units:
            unit.swap_out()
        if hooks.in_backward():
            return
        self._mark_compute(None)
        backward_follows = torch.is_grad_enabled() and self._watch_outputs(stop, outputs)
        if backward_follows:
            self._mark_backward(stop, hooks.find_tensors(kept))
        if site == 0:
            self._finish(self.forward)
        try:
            for unit in stop.units:
                unit.refuse_writes()
        finally:
            if not (backward_follows and stop.inner):
                self.gathering.drop(stop.units)
        if site == 0:
            self.raise_failures(alone=self._evaluating)

    def _enter_backward(self, stop: Stop) -> None:
        """The gradient of what a site returned is there; where it has a graph, that will read the weights again."""
        self.before_backward(stop)
        self._is_differentiable = self._is_differentiable or torch.is_grad_enabled()

    def before_backward(self, stop: Stop) -> None:
        """The backward reaches a site, or its forward is recomputed there."""
        if not self._in_backward:
            self._begin_backward()
        if stop.inner:  # around the others, and gathered until the backward ends: nobody is left for it
            self._visit(stop, self.backward)
            return
        behind, self._behind = self._behind, stop
        if behind is stop:
            self.gathering.gather(stop.units)
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
        if (self._behind is None or unit not in self._behind.units) and unit.late and not self._is_differentiable:
            unit.late = False
            self.gathering.drop([unit])
        if self.on_complete is not None and complete:
            self.on_complete(unit)

    def _begin_forward(self) -> None:
        self.settle()
        self._evaluating = not torch.is_grad_enabled()
        self.forward.begin()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.backward.begin()
        if self.defer_reduction or self._no_sync:
            self.reduction.defer()
        else:
            self.reduction.begin([unit for index in self._backward_order() for unit in self.stops[index].units])
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._mark_compute(None)
        behind, self._behind = self._behind, None
        keeps, self._is_differentiable = self._is_differentiable, False
        self._in_backward = False
        self._finish(self.backward)
        if not (self.defer_reduction or self._no_sync):
            self.reduction.end()
        if self.ranks.size == 1:
            self.forward.adopt(keep_all=False)
            self.backward.adopt(keep_all=False)
        if keeps:
            return  # until the next forward begins
        if not self.forward.active:
            self._unannounced.clear()
            self.settle()
        elif behind is not None:  # a backward inside a forward, which goes on
            self._leave(behind)

    def _abandon_backward(self) -> None:
        self._in_backward, self._behind, self._is_differentiable = False, None, False
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
        """Every site once, in the order in which backwards are expected to leave them: those around others last."""
        seen = dict.fromkeys(reversed([*self.backward.expected]))
        order = [*reversed(list(seen)), *(stop.index for stop in self.stops if stop.index not in seen)]
        return sorted(order, key=lambda index: self.stops[index].inner)

    def _visit(self, stop: Stop, schedule: Schedule) -> None:
        """Claims a site's units and those expected next, and waits for the site's own."""
        num_ahead, passed = schedule.num_ahead, schedule.visit(stop.index)
        if passed is None and stop in self._passed:
            self._passed.remove(stop)  # late by the agreed order, and kept for this
        elif passed is None:
            self.gathering.claim_alone(stop.units)
        elif self.ranks.size == 1:
            self._forget(passed[:num_ahead])
            schedule.skip()
        else:
            self._passed += [self.stops[index] for index in passed]
        for index in schedule.issue(self.prefetch_units):
            self.gathering.claim(self.stops[index].units)
        for early in self._passed[:-KEPT_SITES]:
            self.gathering.drop(early.units)
        self._passed = self._passed[-KEPT_SITES:]
        self.gathering.gather(stop.units)

    def _forget(self, passed: Sequence[int]) -> None:
        for index in passed:
            for unit in self.stops[index].units:
                if unit.claims:
                    self.gathering.drop([unit])

    def _finish(self, schedule: Schedule) -> None:
        """Takes part in what the agreed order still holds for other ranks, and keeps nothing for later."""
        ahead, rest = schedule.end()
        for index in ahead:
            self.gathering.drop(self.stops[index].units)
        if self.ranks.size > 1:
            for index in rest:
                self.gathering.claim(self.stops[index].units)
                self.gathering.drop(self.stops[index].units)
        for stop in self._passed:
            self.gathering.drop(stop.units)
        self._passed.clear()

    def _watch_outputs(self, stop: Stop, outputs: Any) -> bool:
        """Marks the start of the backward on what the site returned; says whether there will be one."""
        tensors = list(hooks.find_tensors(outputs))
        for tensor in tensors:
            if any(holds_storage(tensor, unit) for unit in stop.units):
                self.gathering.claim(stop.units)  # a parameter is on its way out of its module: keep it readable
        watched = self._mark_backward(stop, tensors)
        if not watched and any(unit.trainable for unit in stop.units) and outputs is not None:
            self.gathering.claim(stop.units)  # the outputs are hidden from us, so the backward may come unannounced
            self._unannounced.update(stop.units)
        return watched

    def _mark_backward(self, stop: Stop, tensors: Iterable[torch.Tensor]) -> bool:
        """Has the gradient of each of `tensors` announce the site's backward; says whether there will be any."""
        watched = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in watched:
            tensor.register_hook(lambda _: self._enter_backward(stop))
        return bool(watched)

    def _leave(self, stop: Stop) -> None:
        """The backward has moved on from a site: nothing reads its weights, unless a gradient is still to come."""
        for unit in stop.units if not self._is_differentiable else ():
            if unit.trainable and unit.fires < unit.calls:
                unit.late = True
            else:
                self.gathering.drop([unit])

    def gradient_growth_bytes(self) -> int:
        """What gradients on the device will grow by in the next backward."""
        return sum(unit.gradient.growth_bytes for unit in self.units if unit.trainable)

    # -- weights ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Between passes: releases whatever is still gathered."""
        self._passed.clear()
        for unit in self.units:
            unit.swap_out()
            unit.forget_views()
            if unit not in self._unannounced:
                self.gathering.release(unit)

    def recover(self) -> None:
        """Gives modules their parameters back where a forward was broken off by what no hook sees, such as Ctrl-C."""
        if any(unit.swapped for unit in self.units) and not hooks.in_module_call():
            self.forward.end()
            self._mark_compute(None)
            self.settle()

    def refuse_inside_full_params(self, what: str) -> None:
        """Raises where parameters are shown whole: what is written to them reaches the tiers at the end of it."""
        if self.shown:
            raise StateError(
                f"{what} was called inside `with unbounded.full_params(model):`, where what is written to parameters "
                f"is not kept yet. Call {what} behind the block."
            )

    def raise_failures(self, *, alone: bool = True) -> None:
        """Raises what failed in fetches: where there was a gather on all ranks, else on this one if `alone`.

        A forward without a gather may be one rank's own. What fails in a part of training waits for the step.
        """
        if self.gathering.has_joined():
            self.failures.meet()
        elif alone:
            self.failures.raise_noted()

    def borrow(self, unit: Unit, *, counted: bool) -> bool:
        """Gathers a unit for a computation outside its site's forward, until the pass is over; whether there is one.

        Inside the model's own code, and in a loss, every rank does the same. A look from outside may be one rank's.
        """
        in_pass = self._in_backward or self.forward.active or hooks.in_module_call()
        is_collective = in_pass or torch.is_grad_enabled()
        if unit.state is WeightState.RELEASED and self.gathering.needs_peers(unit) and not is_collective:
            raise StateError(
                f"the parameters of unit {unit.name!r} are partitioned over {self.ranks.size} ranks and not gathered "
                "outside a forward. Read or change them inside `with unbounded.full_params(model):` on every rank."
            )
        if counted and not hooks.in_backward():
            unit.calls += 1
        self.gathering.claim_alone([unit])
        self.gathering.gather([unit])
        return in_pass

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
