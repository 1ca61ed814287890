"""The engine of one sharded model: what happens to which units as its passes go from site to site.

    forward    | s0 | s1 | s2 |                    compute
    fetch   | s0 | s1 | s2 | s3 |                  weights: update, disk, host, device, gather, ahead of use
    backward                    | s2 | s1 | s0 |
    reduce                           | s2 | s1 | s0 |

A unit is gathered while anybody has a claim on it (`gathering`): the prefetch takes one for every visit it expects, and
the visit gives it back: at the end of the site's forward, or, in the backward, once another site's has begun. A site
with other sites inside (the root) keeps its claim until the backward ends. In the backward a visit begins where a
saved weight of the site is read, or where its forward is recomputed. With several ranks, gathers and reductions are
launched in an order all ranks agree on, whatever their own passes do (see `order`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from unbounded.errors import StateError
from unbounded.observe import trace
from unbounded.process import OwningProcess
from unbounded.ranks.cut import join_cut
from unbounded.ranks.failures import Failures
from unbounded.ranks.mesh import Axes
from unbounded.ranks.phases import Phases
from unbounded.zero.gradients.reduction import Reduction
from unbounded.zero.parameters.snapshots import Snapshots
from unbounded.zero.parameters.views import takes_gradients
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.passes import hooks
from unbounded.zero.passes.direction import Pass, RunningSite
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.inputs import Inputs
from unbounded.zero.passes.module_buffers import ModuleBuffers
from unbounded.zero.passes.order import Order
from unbounded.zero.passes.saved import Saving
from unbounded.zero.setup.thawing import Thawing
from unbounded.zero.unit import Unit, WeightState


class Engine:
    """Follows the passes: `gathering` brings weights, `reduction` takes the gradients from here."""

    def __init__(
        self,
        sites: Sequence[RunningSite],
        *,
        axes: Axes,
        device: torch.device,
        phases: Phases,
        gathering: Gathering,
        reduction: Reduction,
        prefetch_units: int,
        defer_reduction: bool,
        inputs: Inputs,
        failures: Failures,
        writes: Writes,
        thawing: Thawing,
        buffers: ModuleBuffers,
    ) -> None:
        self._owner = OwningProcess()
        self.sites, self.device, self.inputs, self.phases = sites, device, inputs, phases
        self.axes, self.ranks = axes, axes.data
        self.gathering, self.reduction, self.failures, self.writes = gathering, reduction, failures, writes
        self._thawing, phases.standing = thawing, thawing.describe
        self._buffers = buffers
        self.units = [unit for site in sites for unit in site.units]
        self.snapshots = Snapshots()
        self.num_backwards = 0  # since the last step
        self.is_shown = False  # every parameter holds its full value
        self._defer_reduction = defer_reduction
        indices = [site.index for site in sites]
        ahead = {"num_ranks": axes.data.size, "num_ahead": prefetch_units}
        self.forward = Pass(sites, Order(indices), gathering, **ahead)
        self.backward = Pass(sites, Order(indices[:1] + indices[:0:-1]), gathering, **ahead)
        self._site_of = {unit: site for site in sites for unit in site.units}
        self._saving = Saving()
        self._is_evaluating = False
        self._is_reducing = False
        self._no_sync = False
        self._looked_at: Unit | None = None  # gathered for a look from outside, until another or a pass takes its place
        self._norms: dict[Unit, tuple[int, torch.Tensor]] = {}  # of single parameters' gradients, while those last
        self._computing: AbstractContextManager[None] | None = None
        for unit in self.units:
            unit.engine = weakref.proxy(self)

    def check_process(self) -> None:
        """Raises in a forked child, which has the model's memory but nothing that runs it."""
        self._owner.check("this sharded model")

    # -- forward ---------------------------------------------------------------------------------------------------

    def before_forward(self, index: int) -> None:
        """A site's forward begins, or is recomputed inside a backward."""
        self.check_process()
        site = self.sites[index]
        if hooks.in_backward():
            self.before_backward(site)
        else:
            self._saving.enter()
            if self.backward.is_running:  # the last backward ended in an exception
                self._abandon_backward()
            if index == 0:
                self._begin_forward()
            self.forward.visit(site)
            self._mark_compute(site)
            for unit in site.units:
                self.writes.watch(unit)
        self._buffers.swap_in(index)
        for unit in site.units:
            unit.views.swap_in()

    def after_forward(self, index: int, outputs: Any) -> None:
        """A site's forward is over: the user's parameters return."""
        site = self.sites[index]
        self._buffers.swap_out(index)
        if hooks.in_backward():
            for unit in site.units:
                unit.views.end_forward(check=False)
                unit.views.swap_out()
            return
        written = {unit: self.writes.find(unit) for unit in site.units if unit.views.is_swapped}
        for unit in site.units:
            unit.views.swap_out()
        self._saving.leave()
        self._mark_compute(None)
        if index == 0 and torch.is_grad_enabled():
            hooks.announce(outputs, self._expect_backward)
        if index == 0:
            self.forward.end()
            self.phases.leave()
        try:
            for unit, slots in written.items():
                if slots:
                    self.writes.keep_from_forward(unit, slots)
        finally:
            if not (site.is_outer and torch.is_grad_enabled()):
                self.gathering.drop(site.units)
        if index == 0:
            self.raise_failures(alone=self._is_evaluating)

    def _begin_forward(self) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # inside code that is compiled this is not reached
            raise StateError(
                "a sharded model cannot be traced or exported: its weights come and go. Do it with a plain copy: "
                "copy.deepcopy(model), or unbounded.unshard(model)."
            )
        self.snapshots.settle()
        self.settle()
        self._is_evaluating = not torch.is_grad_enabled()
        self.phases.enter("a forward without gradients" if self._is_evaluating else "a forward with gradients")
        self.forward.begin()

    # -- backward --------------------------------------------------------------------------------------------------

    def before_reading(self, unit: Unit) -> None:
        """A backward reads a saved weight of `unit`."""
        site = self._site_of[unit]
        if unit.state is WeightState.GATHERED and (unit.resident or site is self.backward.current):
            return
        if hooks.in_backward():
            self.before_backward(site)
        else:  # somebody looks at what a node has saved
            self.gathering.claim_alone([unit])
        self.gathering.gather([unit])

    def before_backward(self, site: RunningSite) -> None:
        """The backward reaches a site, or its forward is recomputed there."""
        self.check_process()
        if not self.backward.is_running:
            self._begin_backward()
        if site.is_outer:  # around the others, and gathered until the backward ends
            self.backward.visit(site)
            return
        before, self.backward.current = self.backward.current, site
        if before is site:
            self.gathering.gather(site.units)
            return
        self._mark_compute(None)
        if before is not None:
            self.gathering.drop(before.units)
        self.backward.visit(site)
        self._mark_compute(site)

    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """One autograd node of `unit` has all its gradients: called once for every use in a forward."""
        if not self.backward.is_running:
            self._begin_backward()
        self._begin_reducing()
        with torch.no_grad():
            self.reduction.collect(unit, gradients, defer=self._is_deferring)

    def gradients_complete(self, unit: Unit) -> None:
        """Every use of `unit` in this backward has given its gradients."""
        with torch.no_grad():
            self.reduction.complete(unit, defer=self._is_deferring)

    @property
    def _is_deferring(self) -> bool:
        return self._defer_reduction or self._no_sync

    def _expect_backward(self) -> None:
        """The gradient of what the model returned is there."""
        if not self.backward.is_running and hooks.in_backward():
            self.before_backward(self.sites[0])

    def _begin_backward(self) -> None:
        self.phases.enter("a backward")
        self.backward.begin()
        self._is_reducing = False
        if takes_gradients(self.units):
            self._begin_reducing()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _begin_reducing(self) -> None:
        """Not for `torch.autograd.grad`, which gives its gradients to whoever called it."""
        if self._is_reducing:
            return
        self._is_reducing = True
        self.num_backwards += 1
        if self._is_deferring:
            self.reduction.defer()
        else:
            self.reduction.begin([unit for index in self._reduction_order() for unit in self.sites[index].units])

    def _end_backward(self) -> None:
        self._mark_compute(None)
        last = self.backward.current
        self.backward.end()
        if self._is_reducing:
            self.reduction.end(defer=self._is_deferring)
            for unit in self.units:
                unit.gradient.settle_lent()
        self.phases.leave()
        if self.ranks.size == 1:
            self.forward.order.adopt(keep_all=False)
            self.backward.order.adopt(keep_all=False)
        if not self.forward.is_running:
            self.settle()
        elif last is not None:  # a backward inside a forward, which goes on
            self.gathering.drop(last.units)

    def finish_gradients(self) -> None:
        """All ranks of the axis must call this. Makes the ranks agree on which parameters have a gradient and reduces
        what was deferred; where their passes went alike, they adopt the order of these.
        """
        trainable = [unit for unit in self.units if unit.trainable]
        for unit, held in zip(trainable, self._agree(trainable), strict=True):
            if held:
                self.reduction.flush(unit, wide=held > 1)
        self.reduction.forget()
        for unit in trainable:
            with self.failures.noting():
                unit.gradient.order_stream()

    def adopt_gradients(self) -> None:
        """Takes over the gradients that parameters had before `shard`, as those of a backward that was not reduced."""
        for unit in self.units:
            found, unit.views.first_gradients = unit.views.first_gradients, []
            if unit.trainable and any(gradient is not None for gradient in found):
                self.reduction.collect(unit, found, defer=self.ranks.size > 1)

    def _agree(self, units: Sequence[Unit]) -> list[int]:
        """What any rank has yet to reduce of each unit: 0 is nothing, 1 a gradient, 2 a sum of several."""
        locals_ = [unit.gradient.local for unit in units]
        held = [0 if local is None else 1 + (local.dtype != u.dtype) for local, u in zip(locals_, units, strict=True)]
        if self.ranks.size == 1:
            return held
        used = itertools.chain.from_iterable(unit.gradient.used for unit in units)
        marks = [self.forward.order.mark, self.backward.order.mark]
        votes = torch.tensor([*used, *held, *marks, *(-mark for mark in marks)], dtype=torch.int64)
        agreed = iter(self.ranks.max(votes.to(self.device)).tolist())
        for unit in units:
            unit.gradient.used = bytearray(itertools.islice(agreed, len(unit.gradient.used)))
        held = list(itertools.islice(agreed, len(units)))
        forward, backward, least_forward, least_backward = agreed
        if (forward, backward) == (-least_forward, -least_backward):
            self.forward.order.adopt(keep_all=True)
            self.backward.order.adopt(keep_all=True)
        return held

    def _abandon_backward(self) -> None:
        self.backward.abandon()
        self.reduction.abandon()
        self.settle()

    def _reduction_order(self) -> list[int]:
        """Every site once, in the order in which backwards are expected to leave them: those around others last."""
        seen = dict.fromkeys(reversed([*self.backward.order.expected]))
        order = [*reversed(list(seen)), *(site.index for site in self.sites if site.index not in seen)]
        return sorted(order, key=lambda index: self.sites[index].is_outer)

    def gradient_growth_bytes(self) -> int:
        """What gradients on the device will grow by in the next backward."""
        return sum(unit.gradient.growth_bytes for unit in self.units if unit.trainable)

    def forward_order(self) -> list[Unit]:
        """All units in the order in which the next forward is expected to need them."""
        place = {site: position for position, site in reversed(list(enumerate(self.forward.order.expected)))}
        ranked = sorted(self.sites, key=lambda site: place.get(site.index, len(place)))
        return [unit for site in ranked for unit in site.units]

    # -- between passes --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Releases whatever is still gathered."""
        self._looked_at = None
        for unit in self.units:
            unit.views.swap_out()
            self.gathering.release(unit)

    def recover(self) -> None:
        """Gives modules their parameters back where a forward was broken off by what no hook sees, such as Ctrl-C."""
        self.check_process()
        if any(unit.views.is_swapped for unit in self.units) and not hooks.in_module_call():
            self.forward.abandon()
            self._saving.reset()
            self._buffers.reset()
            self._mark_compute(None)
            self.settle()

    def refuse_inside_full_params(self, what: str) -> None:
        """Raises where parameters are shown whole: what is written to them reaches the tiers at the end of it."""
        if self.is_shown:
            raise StateError(
                f"{what} was called inside `with unbounded.full_params(model):`, where what is written to parameters "
                f"is not kept yet. Call {what} after the block."
            )

    def raise_failures(self, *, alone: bool = True) -> None:
        """Raises what failed in fetches: where there was a gather on all ranks, otherwise on this one if `alone`.

        A forward without a gather may be one rank's own. What fails in a part of training waits for the step.
        """
        if self.gathering.has_joined():
            self.failures.meet()
        elif alone:
            self.failures.raise_noted()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up whole on every rank and reduced by the first backward outside."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    # -- one parameter at a time -----------------------------------------------------------------------------------

    def borrow_value(self, unit: Unit, index: int, *, from_all: bool = False) -> torch.Tensor:
        """The value of one parameter for a computation outside its module's forward.

        Inside the model's own code, and in a loss, every rank does the same; `from_all` says so of a copy of the model.
        A look from outside may be one rank's, which must not wait for others. Outside a pass the value is a copy,
        unless the unit is resident: nothing that lasts may alias bytes that go.
        """
        self.check_process()
        in_pass = self._is_in_pass()
        wants_graph = torch.is_grad_enabled() and unit.trainable and unit.views.parameters[index].requires_grad
        if not (in_pass or wants_graph or from_all):
            self._refuse_partitioned(unit, index)
        self._gather_for_a_look(unit, until_settled=in_pass or wants_graph, is_agreed=from_all)
        with torch.set_grad_enabled(wants_graph):
            value = unit.views.lend()[unit.picks[index]]
            if wants_graph:
                return _refusing_writes(value if in_pass or unit.resident else value.clone())
            is_lasting = unit.resident and not unit.has_master
            return value.data if is_lasting or (in_pass and not unit.resident) else value.clone()

    def snapshot(self, unit: Unit, index: int) -> torch.Tensor:
        """All ranks of the axis must call this. A parameter's value for a state dict, on the host."""
        self.recover()
        with torch.no_grad(), self.phases.during("model.state_dict()"):
            value = self.borrow_value(unit, index, from_all=True)
            self.raise_failures()
            cut = unit.layout.slots[index].cut
            if cut is not None:  # a copy of the whole, which no write goes back from
                return join_cut(cut, value, self.axes.tensor).cpu()
        return self.snapshots.take(unit, index, value)

    def keep_written(self, unit: Unit, index: int, value: torch.Tensor, *, from_all: bool = False) -> None:
        """Brings a new value of a parameter to its tier."""
        self.check_process()
        value = value.data
        if not (from_all or self._is_in_pass()):
            self._refuse_partitioned(unit, index)
        self.writes.keep(unit, index, value)
        if unit.state is WeightState.GATHERED:
            unit.slot_views(unit.buffer)[index].copy_(value)

    def lend_gradient(self, unit: Unit) -> None:
        """All ranks of the axis must call this. Inside full_params: makes the gradient of `unit` whole for the user."""
        if not self.is_shown:
            return
        text = f"the gradient of unit {unit.name!r}, used inside unbounded.full_params()"
        with self.phases.during(text):
            self.phases.begin(text)
            self.finish_gradients()
            if unit.gradient.is_whole or not unit.gradient.is_present:
                return
            unit.gradient.write_out()
            own = unit.gradient.store.copy(0, unit.gradient.store.numel).to(self.device)
            whole = torch.empty(unit.layout.numel, dtype=own.dtype, device=self.device)
            self.ranks.gather(whole, own, unit.name)
            unit.gradient.lend_whole(whole)

    def slot_norms(self, unit: Unit) -> torch.Tensor:
        """All ranks of the axis must call this. The norm of every parameter's gradient, over all ranks."""
        gradient = unit.gradient
        gradient.order_stream()  # what is on its way counts
        if unit not in self._norms or self._norms[unit][0] != gradient.changes or gradient.is_lent:
            with self.phases.during("the norm of gradients"):
                self.finish_gradients()
            squares = [torch.as_tensor(square, dtype=torch.float64) for square in gradient.slot_squares()]
            total = torch.stack([square.to(self.device) for square in squares])
            if not unit.is_whole:
                total = self.ranks.sum(total)
            total = self._sum_over_model(unit, total)
            self._norms[unit] = gradient.changes, total.sqrt().to(gradient.store.dtype)
        return self._norms[unit][1]

    def _sum_over_model(self, unit: Unit, squares: torch.Tensor) -> torch.Tensor:
        """The squares of whole parameters, of which this rank of the tensor axis may have a part."""
        if self.axes.pipeline.size > 1:
            raise StateError(
                "gradients of other pipeline stages are not here, so a norm over model.parameters() would leave them "
                "out. Clip with optimizer.clip_grad_norm_(max_norm), which goes over all stages."
            )
        if self.axes.tensor.size == 1:
            return squares
        slots, is_first = unit.layout.slots, self.axes.tensor.rank == 0
        counts = [is_first if slot.cut is None else slot.cut.is_first for slot in slots]
        return self.axes.tensor.sum(squares * torch.tensor(counts, device=squares.device))

    def train(self, unit: Unit, index: int, *, is_trained: bool) -> None:
        """A parameter is to be trained from the next backward on, or no longer. All ranks must do the same."""
        self.check_process()
        if is_trained and not unit.trainable:
            if self._is_in_pass():
                raise StateError(
                    f"the parameter {unit.layout.slots[index].name!r} was frozen when the model was sharded and cannot "
                    "be unfrozen inside a forward or a backward. Call requires_grad_() between passes."
                )
            self._thawing.thaw(unit, self.units)
        self._thawing.note(unit, index, is_trained=is_trained)

    def _is_in_pass(self) -> bool:
        return self.backward.is_running or self.forward.is_running or hooks.in_module_call()

    def _refuse_partitioned(self, unit: Unit, index: int) -> None:
        is_there = unit.state not in (WeightState.RELEASED, WeightState.STALE)
        if not is_there and self.gathering.needs_peers(unit):
            raise StateError(
                f"the parameter {unit.layout.slots[index].name!r} is partitioned over {self.ranks.size} ranks and not "
                "gathered outside a forward. Read or change it inside `with unbounded.full_params(model):` on every "
                "rank."
            )

    def _gather_for_a_look(self, unit: Unit, *, until_settled: bool, is_agreed: bool) -> None:
        """A loop over all parameters looks at one unit after the other: the one before goes."""
        if until_settled or unit is not self._looked_at:
            before = self._looked_at
            (self.gathering.claim if is_agreed else self.gathering.claim_alone)([unit])
            if not until_settled:
                self._looked_at = unit
                if before is not None:
                    self.gathering.drop([before])
        self.gathering.gather([unit])

    def _mark_compute(self, site: RunningSite | None) -> None:
        """Ends the compute lane's span and begins that of `site`. Innermost sites have one: they do not overlap."""
        if self._computing is not None:
            self._computing.__exit__(None, None, None)
            self._computing = None
        if site is not None and not site.is_outer:
            self._computing = trace.device_span("compute", site.name)
            self._computing.__enter__()


def _refusing_writes(value: torch.Tensor) -> torch.Tensor:
    """The same tensor as one of several views, which autograd lets nobody write to in place: it stands for a leaf."""
    return value.unsqueeze(0).unbind(0)[0]
