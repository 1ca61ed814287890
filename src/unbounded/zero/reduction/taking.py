"""What a backward does with gradients: from the first that it gives to the vote on who has one.

A backward may give none to parameters (`torch.autograd.grad`), so it reduces from the first that it gives, or from its
beginning if its graph shows that it will. Inside `no_sync`, and in stage 1, gradients stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unbounded.zero.gradients.scale_factor import forget_factors
from unbounded.zero.parameters.views import takes_gradients
from unbounded.zero.passes.capture import refuse_capture
from unbounded.zero.passes.direction import Backward, RunningSite
from unbounded.zero.pending import PendingStep
from unbounded.zero.reduction.absent import Absent
from unbounded.zero.reduction.agreement import GradientAgreement
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.unit import Unit


class GradientTaking:
    """The gradients of one model's backwards. `defers`: they are reduced before the step, not in the backward."""

    def __init__(
        self,
        units: Sequence[Unit],
        backward: Backward,
        reduction: Reduction,
        agreement: GradientAgreement,
        pending: PendingStep,
        *,
        defers: bool,
    ) -> None:
        self.num_backwards = 0  # since the last step
        self._units, self._backward, self._reduction = units, backward, reduction
        self._agreement, self._pending, self._defers = agreement, pending, defers
        self._no_sync = False
        self._absent = Absent()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up whole on every rank and reduced by the first backward outside."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @property
    def _is_deferring(self) -> bool:
        return self._defers or self._no_sync

    def note_use_without_graph(self, site: RunningSite) -> None:
        """A part of a forward with gradients is at `site` where no graph is recorded."""
        self._absent.note_use(site.units)

    def begin(self) -> None:
        """A backward begins, and this is called inside it."""
        if self._reduction.ranks.size > 1:
            self._absent.begin(self._units)
        if takes_gradients(self._units):
            self._begin_reducing()

    def pass_to(self, site: RunningSite) -> None:
        """The backward has claimed `site`, so it takes part in the reductions of what it passed and does not use."""
        with torch.no_grad():
            self._reduction.join(self._absent.pass_to(site))

    def collect(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """One use of `unit` in the backward has given its gradients."""
        self._begin_reducing()
        with torch.no_grad():
            self._reduction.collect(unit, gradients, defer=self._is_deferring)

    def complete(self, unit: Unit) -> None:
        """Every use of `unit` in the backward has given its gradients."""
        with torch.no_grad():
            self._reduction.complete(unit, defer=self._is_deferring)

    def expect_no_more(self) -> None:
        """The backward gives nothing more; the rest of its gathers and reductions follow."""
        if self._backward.is_reducing:
            self._reduction.complete_rest(defer=self._is_deferring)
            self._absent.add_rest()

    def end(self, *, is_reducing: bool) -> None:
        """The backward has joined the gathers of the others."""
        self._absent.end()
        if is_reducing:
            self._reduction.end(defer=self._is_deferring)
            if self._no_sync:
                self._agreement.expect_vote()
            else:
                self._agreement.vote()
            for unit in self._units:
                unit.gradient.settle_lent()

    def abandon(self) -> None:
        """The backward ended in an exception."""
        if self._backward.is_reducing:
            self._pending.break_off()
        self._reduction.abandon()

    def take_num_backwards(self) -> int:
        """How many backwards there were since the last step; the next step begins to count."""
        number, self.num_backwards = self.num_backwards, 0
        return number

    def _begin_reducing(self) -> None:
        if self._backward.is_reducing:
            return
        refuse_capture("a backward", self._units[0].device)
        self._pending.refuse("another backward")
        self._backward.reduce()
        forget_factors()
        self.num_backwards += 1
        if self._is_deferring:
            self._reduction.defer()
        else:
            left = sorted(self._backward.sites_by_last_visit(), key=lambda site: site.is_outer)  # around others: last
            self._reduction.begin([unit for site in left for unit in site.units])
            self._absent.follow(left)
