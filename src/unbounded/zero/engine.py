"""The engine of one sharded model: what happens to which units as its passes go from site to site.

    forward    | s0 | s1 | s2 |                    compute
    fetch   | s0 | s1 | s2 | s3 |                  weights: update, disk, host, device, gather, ahead of use
    backward                    | s2 | s1 | s0 |
    reduce                           | s2 | s1 | s0 |

A unit is gathered while anybody has a claim on it (`gathering`). The prefetch takes one for every visit it expects, and
the visit returns it: at the end of the site's forward or, in the backward, once another site's has begun. A site with
other sites inside (the root) keeps its claim until the backward ends. In the backward a visit begins when a saved
weight of the site is read, or when its forward is recomputed. With several ranks, gathers and reductions are
launched in an order all ranks agree on, whatever their own passes do (see `order`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from unbounded.errors import StateError
from unbounded.observe import trace
from unbounded.process import OwningProcess
from unbounded.ranks.failures import Failures
from unbounded.ranks.mesh import Axes
from unbounded.ranks.phases import CopyPhases, Phases
from unbounded.zero.gradients.gradient_value import GradientState
from unbounded.zero.parameters.lending import Lending
from unbounded.zero.parameters.views import refuse_stray_gradients, refuse_unasked_gradients, take_unasked
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.passes import hooks
from unbounded.zero.passes.compute_span import ComputeSpan
from unbounded.zero.passes.direction import Backward, Forward, RunningSite
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.inputs import Inputs
from unbounded.zero.passes.module_buffers import ModuleBuffers
from unbounded.zero.passes.order import Order
from unbounded.zero.passes.turns import Turns, one_at_a_time
from unbounded.zero.pending import PendingStep
from unbounded.zero.reduction.agreement import GradientAgreement
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.reduction.taking import GradientTaking
from unbounded.zero.saved import Saving
from unbounded.zero.unit import Unit, WeightState

FEW_BYTES = 2**24
_is_resident = operator.attrgetter("resident")


class Thaw(Protocol):
    """What gives a unit that was frozen at `shard` all that its training needs (`Thawing`)."""

    def thaw(self, unit: Unit, units: Sequence[Unit]) -> None: ...

    def note(self, unit: Unit, index: int, *, is_trained: bool) -> None: ...

    def describe(self) -> str: ...


class Engine:
    """Follows the passes: `gathering` brings weights, `taking` brings gradients to their reduction.

    `lending` hands out single parameters outside passes; `gradients` is what the ranks agree on before a step.
    """

    def __init__(
        self,
        sites: Sequence[RunningSite],
        *,
        axes: Axes,
        device: torch.device,
        phases: Phases,
        copy_phases: CopyPhases,
        gathering: Gathering,
        reduction: Reduction,
        prefetch_units: int,
        defer_reduction: bool,
        inputs: Inputs,
        failures: Failures,
        writes: Writes,
        thawing: Thaw,
        buffers: ModuleBuffers,
    ) -> None:
        self._owner = OwningProcess()
        self.sites, self.device, self.inputs, self.phases = sites, device, inputs, phases
        self.axes, self.ranks = axes, axes.data
        self.gathering, self.reduction, self.failures, self.writes = gathering, reduction, failures, writes
        self._thawing, phases.standing = thawing, thawing.describe
        self.copy_phases = copy_phases  # of the ranks that compute one copy of the model
        self._buffers = buffers
        self.units = [unit for site in sites for unit in site.units]
        self.pending = PendingStep()
        self.is_shown = False  # every parameter holds its full value
        indices = [site.index for site in sites]
        ahead = {"num_ranks": axes.data.size, "num_ahead": prefetch_units}
        self.forward = Forward(sites, Order(indices), gathering, **ahead)
        self.backward = Backward(sites, Order(indices[:1] + indices[:0:-1]), gathering, **ahead)
        self.turns = Turns(self.forward, self.backward, device)
        self._site_of = {unit: site for site in sites for unit in site.units}
        self._saving = Saving()
        self._compute = ComputeSpan()
        orders = (self.forward.order, self.backward.order)
        self.gradients = GradientAgreement(self.units, orders, axes, device, phases, reduction, failures)
        self.taking = GradientTaking(
            self.units, self.backward, reduction, self.gradients, self.pending, defers=defer_reduction
        )
        if axes.data.size > 1:
            self.backward.on_claim = partial(GradientTaking.pass_to, weakref.proxy(self.taking))
        own = weakref.proxy(self)
        self.lending = Lending(own, gathering, writes, phases, num_ranks=axes.data.size, tensor=axes.tensor)
        for unit in self.units:
            unit.engine = own

    @property
    def has_gradients(self) -> bool:
        """Whether this rank holds the gradient of an earlier backward. Waits for nobody."""
        gradients = (unit.gradient for unit in self.units if unit.trainable)
        return any(each.local is not None or each.state is GradientState.HELD for each in gradients)

    def turn(self) -> AbstractContextManager[None]:
        """For everything that is done to the model outside its passes: inside, no other thread uses it."""
        self.check_process()
        return self.turns

    def check_process(self) -> None:
        """Raises in a forked child, which has the model's memory but nothing that runs it."""
        self._owner.check("this sharded model")

    # -- forward ---------------------------------------------------------------------------------------------------

    def before_forward(self, index: int) -> None:
        """A site's forward begins, or is recomputed inside a backward."""
        if self._has_stood_in(index):
            self._buffers.stay(index)
            for unit in self.sites[index].units:
                unit.views.stay()
        else:
            self._enter(index)

    def _has_stood_in(self, index: int) -> bool:
        """Whether the model's forward has put in the weights of this site, which is inside it, at its beginning."""
        return index > 0 and self.forward.stands and not hooks.in_backward()

    @one_at_a_time
    def _enter(self, index: int) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # compiled code does not come here
            raise StateError(
                "a sharded model cannot be traced or exported: its weights come and go. Do it with a plain copy: "
                "copy.deepcopy(model), or unbounded.unshard(model)."
            )
        site = self.sites[index]
        if hooks.in_backward():
            self.before_backward(site)
        else:
            if index == 0:
                self.turns.wait_for_forward()
            self._drop_broken_backward()
            self.pending.refuse("a forward")
            self._saving.enter(is_needed=self._follows_sites())
            if index == 0:
                self._begin_forward()
            self._visit(site)
        for entered in self._sites_of(site):
            self._buffers.swap_in(entered.index)
            for unit in entered.units:
                unit.views.swap_in()

    def _visit(self, site: RunningSite) -> None:
        if self.forward.stands:
            self.gathering.gather(self.units)
        else:
            self.forward.visit(site)
        if not (torch.is_grad_enabled() or self.forward.is_evaluating):
            self.taking.note_use_without_graph(site)
        self._compute.begin(site, is_whole=self.forward.stands)
        for entered in self._sites_of(site):
            for unit in entered.units:
                if self.is_shown:
                    unit.views.take_shown()
                self.writes.watch(unit)

    def _follows_sites(self) -> bool:
        """Whether it matters which site a pass is in: weights come and go, or a trace shows it."""
        return trace.is_recording() or not all(map(_is_resident, self.units))

    def _sites_of(self, site: RunningSite) -> Sequence[RunningSite]:
        """The sites whose weights are put in and taken out with those of `site`."""
        return self.sites if site.index == 0 and self.forward.stands else [site]

    def after_forward(self, index: int, outputs: Any, *, are_hooks_left: bool) -> None:
        """A site's forward is over: the user's parameters go back into the modules, at once if hooks look at them."""
        if not self._has_stood_in(index):
            self._leave(index, outputs)
        elif are_hooks_left:
            self._hand_back(self.sites[index])

    @one_at_a_time
    def _hand_back(self, site: RunningSite) -> None:
        self._keep_written(self._take_out([site]))

    @one_at_a_time
    def _leave(self, index: int, outputs: Any) -> None:
        if not (hooks.in_backward() or self._saving.is_entered):  # it was refused before it began
            return
        site = self.sites[index]
        if hooks.in_backward():
            self._buffers.swap_out(index)
            for unit in site.units:
                unit.views.end_forward()
                unit.views.swap_out()
            return
        try:
            written = self._end_sites(self._sites_of(site))
            if index == 0 and torch.is_grad_enabled():
                hooks.announce(outputs, self._expect_backward)
            self._keep_written(written)
        finally:
            if not (site.is_outer and torch.is_grad_enabled()):
                self.gathering.drop(site.units)
        if index == 0:
            self.raise_failures(alone=self.forward.is_evaluating)

    def _end_sites(self, sites: Sequence[RunningSite]) -> dict[Unit, list[int]]:
        """Undoes what `before_forward` did, whatever fails; returns which slots of which units the forward wrote to."""
        try:
            return self._take_out(sites)
        finally:
            self._saving.leave()
            self._compute.end()
            if sites[0].index == 0:
                self._end_forward()

    def _take_out(self, sites: Sequence[RunningSite]) -> dict[Unit, list[int]]:
        for site in sites:
            self._buffers.swap_out(site.index)
        try:
            return {unit: self.writes.find(unit) for site in sites for unit in site.units if unit.views.is_swapped}
        finally:
            for site in sites:
                for unit in site.units:
                    unit.views.swap_out()

    def _keep_written(self, written: Mapping[Unit, list[int]]) -> None:
        for unit, slots in written.items():
            if slots:
                self.writes.keep_from_forward(unit, slots)

    def _end_forward(self) -> None:
        try:
            self.forward.end()
        finally:
            self.phases.leave()

    def _begin_forward(self) -> None:
        self.lending.copies.settle()
        self.settle()
        self.phases.enter("a forward with gradients" if torch.is_grad_enabled() else "a forward without gradients")
        self.forward.begin()
        self.forward.stands = self._can_stand()

    def _can_stand(self) -> bool:
        """Whether all weights can be put in at once, so that nothing is left to do at the sites inside.

        Where weights are updated in lanes, a forward waits for those of each site instead, unless they are few.
        """
        if self.ranks.size > 1 or self._follows_sites():
            return False
        is_ready = all(unit.state is WeightState.GATHERED for unit in self.units)
        is_ready = is_ready or sum(unit.num_bytes for unit in self.units) <= FEW_BYTES
        return is_ready and not any(map(self.writes.is_new, self.units))

    # -- backward --------------------------------------------------------------------------------------------------

    def before_reading(self, unit: Unit) -> None:
        """A backward reads a saved weight of `unit`."""
        if trace.is_recording() or not (
            unit.resident and unit.state is WeightState.GATHERED and not self.pending.units
        ):
            self._bring_for_reading(unit)

    @one_at_a_time
    def _bring_for_reading(self, unit: Unit) -> None:
        if unit in self.pending.units:
            self.pending.refuse(f"a read of the weights of unit {unit.name!r} after their gradient was complete")
        self.gathering.follow()
        is_at_site = self._site_of[unit] is self.backward.current
        if unit.state is WeightState.GATHERED and (is_at_site or (unit.resident and not trace.is_recording())):
            return
        if hooks.in_backward():
            self.before_backward(self._site_of[unit])
        else:  # somebody looks at what a node has saved
            self.gathering.claim_alone([unit])
        self.gathering.gather([unit])

    @one_at_a_time
    def before_backward(self, site: RunningSite) -> None:
        """The backward reaches a site, or its forward is recomputed there."""
        self._join_backward()
        if site.is_outer:  # around the others, and gathered until the backward ends
            self.backward.visit(site)
            return
        before, self.backward.current = self.backward.current, site
        if before is site:
            self.gathering.gather(site.units)
            return
        self._compute.end()
        if before is not None:
            self.gathering.drop(before.units)
        self.backward.visit(site)
        self._compute.begin(site)

    @one_at_a_time
    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """One autograd node of `unit` has all its gradients: called once for every use in a forward."""
        self._join_backward()
        self.taking.collect(unit, gradients)

    @one_at_a_time
    def gradients_complete(self, unit: Unit) -> None:
        """Every use of `unit` in this backward has given its gradients."""
        self.taking.complete(unit)

    @one_at_a_time
    def _expect_backward(self) -> None:
        """The gradient of the model's output has arrived."""
        self._drop_broken_backward()
        if not self.backward.is_running and hooks.in_backward():
            self.before_backward(self.sites[0])

    def _join_backward(self) -> None:
        """A backward is running: begins one unless it has already begun."""
        self._drop_broken_backward()
        self.turns.wait_for_backward()
        if not self.backward.is_running:
            self._begin_backward()

    def _drop_broken_backward(self) -> None:
        """Gives up a backward that ended in an exception: torch has dropped what it would have called at the end."""
        if self.backward.is_broken:
            self._compute.end()
            self.taking.abandon()
            self.backward.abandon()
            for unit in self.units:
                take_unasked(unit)
            self.phases.leave()
            if not self.forward.is_running:
                self.settle()

    def _begin_backward(self) -> None:
        self.phases.enter("a backward")
        self.backward.begin()
        self.taking.begin()
        if not self._follows_sites():
            self._compute.begin(self.sites[0], is_whole=True)
        self.backward.queue_end(partial(self._end_backward))

    @one_at_a_time
    def _end_backward(self) -> None:
        self._compute.end()
        last, is_reducing = self.backward.current, self.backward.is_reducing
        try:
            self.taking.expect_no_more()
            self.backward.end()
            self.taking.end(is_reducing=is_reducing)
        finally:
            self.phases.leave()
            if not self.forward.is_running:
                self.settle()
            elif last is not None:  # a backward inside a forward, which continues
                self.gathering.drop(last.units)
        if self.ranks.size == 1:
            self.forward.order.adopt(keep_all=False)
            self.backward.order.adopt(keep_all=False)
        refuse_stray_gradients(self.units)
        refuse_unasked_gradients(self.units)

    def forward_order(self) -> list[Unit]:
        """All units in the order in which the next forward is expected to need them."""
        return [unit for site in self.forward.sites_by_first_visit() for unit in site.units]

    # -- between passes --------------------------------------------------------------------------------------------

    def confirm(self, text: str) -> None:
        """All ranks must call this. Returns when all that hold a part of this model are about to do `text`."""
        self.copy_phases.confirm(text)
        self.phases.confirm(text)

    def begin_load(self) -> None:
        """All ranks that hold a part of the model must call this, before values are loaded into each part."""
        text = "model.load_state_dict()"
        self.copy_phases.confirm(text)
        if not all(unit.is_whole for unit in self.units):
            self.phases.confirm(text)

    def settle(self) -> None:
        """Releases whatever is still gathered."""
        self.lending.forget_look()
        for unit in self.units:
            unit.views.swap_out()
            self.gathering.release(unit)

    def recover(self) -> None:
        """Ends interrupted passes: a backward by any exception, a forward by what no hook sees, such as Ctrl-C."""
        self.check_process()
        self._drop_broken_backward()
        is_left = self._saving.is_entered or any(unit.views.is_swapped for unit in self.units)
        if is_left and not hooks.in_module_call():
            self.forward.abandon()
            self._saving.reset()
            self._buffers.reset()
            self._compute.end()
            self.settle()

    def leave_forward(self) -> None:
        """Ends the forward that this thread is inside of, whose weights are about to change: the rest runs outside it.

        What it has written to weights so far is kept.
        """
        if not self._saving.is_entered:
            return
        for site in reversed(self.sites):  # from the inside out
            if any(unit.views.is_swapped for unit in site.units) or (site.index == 0 and self.forward.is_running):
                self._keep_written(self._end_sites([site]))
        self.settle()

    def refuse_inside_full_params(self, what: str) -> None:
        """Raises while parameters are whole, because writes to them reach the tiers only afterwards."""
        if self.is_shown:
            raise StateError(
                f"{what} was called inside `with unbounded.full_params(model):`, where writes to parameters "
                f"are not stored yet. Call {what} after the block."
            )

    def check_weights(self, unit: Unit) -> None:
        """Raises where weights of `unit` are read or written while they are those of a step that was not called yet.

        Inside the backward that updates units, those that it has not reached are as they were.
        """
        self.check_process()
        if self.pending.units and (not self.is_in_pass() or unit in self.pending.units):
            self.pending.refuse(f"a look at the weights of unit {unit.name!r}")

    def refuse_pending(self, what: str) -> None:
        """Raises where a backward has updated units and their step was not called yet."""
        if self.pending.units:
            self._drop_broken_backward()
            self.pending.refuse(what)

    def raise_failures(self, *, alone: bool = True) -> None:
        """Raises what failed in fetches: on all ranks if there was a gather, otherwise on this one if `alone`.

        A forward without a gather may be on one rank only. A failure in a part of training waits for the step.
        """
        if self.gathering.has_joined():
            self.failures.meet()
        elif alone:
            self.failures.raise_noted()

    @one_at_a_time
    def train(self, unit: Unit, index: int, *, is_trained: bool) -> None:
        """Trains a parameter from the next backward on, or stops. All ranks must do the same."""
        self.check_process()
        if is_trained and not unit.trainable:
            if self.is_in_pass():
                raise StateError(
                    f"the parameter {unit.layout.slots[index].name!r} was frozen when the model was sharded and cannot "
                    "be unfrozen inside a forward or a backward. Call requires_grad_() between passes."
                )
            self._thawing.thaw(unit, self.units)
        self._thawing.note(unit, index, is_trained=is_trained)

    def set_shown(self, is_shown: bool) -> None:
        """Every parameter holds its full value from now on, and nothing is released; or no longer."""
        self.is_shown = self.gathering.holding = is_shown
        self.turns.showing.set(is_shown)

    def is_in_pass(self) -> bool:
        """Whether the model's own code, its loss or a backward is running."""
        self._drop_broken_backward()
        return self.backward.is_running or self.forward.is_running or hooks.in_module_call()

    def is_held(self, unit: Unit) -> bool:
        """Whether the backward keeps the unit gathered until it goes on: a part of its site is recomputed, perhaps."""
        is_here = hooks.in_backward() and self._site_of[unit] is self.backward.current
        return is_here and unit.state is WeightState.GATHERED
