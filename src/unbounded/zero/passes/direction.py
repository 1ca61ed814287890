"""A pass over the sites of a model: what it has visited, what it expects next, and which weights that keeps gathered.

    from       by        to         when
    IDLE       begin     RUNNING    a forward enters the model; a backward reaches it
    RUNNING    reduce    REDUCING   a backward has gradients for the parameters themselves, not for autograd.grad
    RUNNING    end       IDLE       also from REDUCING
    RUNNING    abandon   IDLE       also from REDUCING: an exception ended it

A model has two of them, a `Forward` and a `Backward`; a backward may run inside a forward. Neither
leaves anything open when it ends: a backward finds weights again by tokens (see `saved`), so any number of forwards may
wait for their backwards, in any order, as in pipeline schedules.

Each visit claims the site's units and those that the recorded order expects next, and waits for its own. With several
ranks the order is also an agreement (see `order`): sites that others run but this rank does not are gathered anyway,
and a few are kept in case they come later.

A unit on disk takes as long to read as several from the host, so one of those that are fetched ahead is the next one on
disk, however far it is, if the device has room for it: while the units before it are used, it is being read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.order import Order
from unbounded.zero.unit import Unit

# Sites that a rank may keep gathered for later in the pass, because others ran them earlier.
KEPT_SITES = 8


class PassState(Enum):
    IDLE = "idle"
    RUNNING = "running"
    REDUCING = "reducing"


@dataclass(eq=False)
class RunningSite:
    """A site at run time, where a pass stops to gather units. `is_outer`: there are other sites inside it."""

    index: int
    name: str
    is_outer: bool
    units: Sequence[Unit]

    @property
    def is_on_disk(self) -> bool:
        return any(unit.weights.tier == "disk" for unit in self.units)


def _do_nothing(_: RunningSite) -> None:
    pass


class Pass:
    """One direction of a model. `current` is the innermost site that it is in, as far as it is known."""

    is_backward = False

    def __init__(
        self, sites: Sequence[RunningSite], order: Order, gathering: Gathering, *, num_ranks: int, num_ahead: int
    ) -> None:
        self.order, self.state = order, PassState.IDLE
        self.thread = threading.current_thread()  # which has begun the last one
        self.current: RunningSite | None = None
        self.on_claim: Callable[[RunningSite], None] = _do_nothing  # with each one of the order, before waiting for any
        self._sites, self._gathering = sites, gathering
        self._num_ranks, self._num_ahead = num_ranks, num_ahead
        self._passed: list[RunningSite] = []  # claimed for this rank, but not visited when expected
        self._on_disk: set[int] = set()  # sites with weights there
        self._read: RunningSite | None = None  # the one of them that is read ahead

    @property
    def is_running(self) -> bool:
        return self.state is not PassState.IDLE

    def begin(self) -> None:
        self.state, self.current = PassState.RUNNING, None
        self.thread = threading.current_thread()
        self._passed.clear()
        self._read, self._on_disk = None, {site.index for site in self._sites if site.is_on_disk}
        self.order.begin()

    def end(self) -> None:
        """Joins the gathers that the agreed order still has for other ranks, and keeps nothing for later."""
        self.state, self.current = PassState.IDLE, None
        ahead, rest = self.order.end()
        for index in ahead:
            self.on_claim(self._sites[index])
            self._gathering.drop(self._sites[index].units)
        if self._num_ranks > 1:
            for index in rest:
                self._claim(index)
                self._gathering.drop(self._sites[index].units)
        for site in self._passed:
            self._gathering.drop(site.units)
        self._passed.clear()
        self._read_only(None)

    def abandon(self) -> None:
        """It will not continue; the caller releases whatever it holds."""
        self.state, self.current = PassState.IDLE, None
        self.order.end()
        self._passed.clear()

    def visit(self, site: RunningSite) -> None:
        """Claims a site's units and those expected next, and waits for the site's own."""
        num_ahead, passed = self.order.num_ahead, self.order.visit(site.index)
        if passed is None and site in self._passed:
            self._passed.remove(site)  # later than in the agreed order, and kept for this
        elif passed is None:
            self._gathering.claim_alone(site.units)
        elif self._num_ranks == 1:
            self._forget(passed[:num_ahead])
            self.order.skip()
        passed = passed if passed is not None and self._num_ranks > 1 else ()
        for index in passed[:num_ahead]:
            self._keep(index)
        reads_ahead = self._num_ahead > 1 and bool(self._on_disk)
        for place, index in enumerate(self.order.issue(self._num_ahead - reads_ahead), start=num_ahead):
            self._claim(index)
            if place < len(passed):
                self._keep(index)
        if reads_ahead:
            self._read_ahead()
        self._gathering.gather(site.units)

    def _claim(self, index: int) -> None:
        self._gathering.claim(self._sites[index].units)
        self.on_claim(self._sites[index])

    def _keep(self, index: int) -> None:
        """Keeps a site that was expected before the one that is visited, instead of the first of those kept so far."""
        self._passed.append(self._sites[index])
        if len(self._passed) > KEPT_SITES:
            self._gathering.drop(self._passed.pop(0).units)

    def _read_ahead(self) -> None:
        """Begins to read the next site on disk once the one before it has been claimed."""
        index = self.order.next_of(self._on_disk)
        site = None if index is None else self._sites[index]
        num_bytes = sum(unit.num_bytes for unit in site.units) if site is not None else 0
        if self._gathering.room.allows(num_bytes, is_backward=self.is_backward) or site is self._read:
            self._read_only(site)

    def _read_only(self, site: RunningSite | None) -> None:
        """Reads this site ahead, and not the one before, which was claimed or will not be visited."""
        if site is not self._read:
            for unit in self._read.units if self._read is not None else ():
                self._gathering.drop_read(unit)
            for unit in site.units if site is not None else ():
                self._gathering.read_ahead(unit)
        self._read = site

    def sites_by_first_visit(self) -> list[RunningSite]:
        """Every site once, in the order in which the next pass is expected to come to them first."""
        return self._every_site(dict.fromkeys(self.order.expected))

    def sites_by_last_visit(self) -> list[RunningSite]:
        """Every site once, in the order in which the next pass is expected to come to them last."""
        return self._every_site(reversed(dict.fromkeys(reversed(self.order.expected))))

    def _every_site(self, expected: Iterable[int]) -> list[RunningSite]:
        """The expected sites, followed by all others."""
        indices = dict.fromkeys(expected)
        others = (site for site in self._sites if site.index not in indices)
        return [*(self._sites[index] for index in indices), *others]

    def _forget(self, passed: Sequence[int]) -> None:
        for index in passed:
            for unit in self._sites[index].units:
                if unit.claims:
                    self._gathering.drop([unit])


class Forward(Pass):
    """The pass through the model's own code. `is_evaluating`: the last one to begin records no gradients.

    `stands`: all weights are there and in the modules from its beginning to its end, so it stops at no other site.
    """

    is_evaluating = stands = False

    def begin(self) -> None:
        super().begin()
        self.is_evaluating = not torch.is_grad_enabled()

    def end(self) -> None:
        self.stands = False
        super().end()

    def abandon(self) -> None:
        self.stands = False
        super().abandon()


class Backward(Pass):
    """The pass through the graph. Torch calls what it queued for the end, or drops it if there was an exception."""

    is_backward = True
    _end: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_reducing(self) -> bool:
        return self.state is PassState.REDUCING

    @property
    def is_broken(self) -> bool:
        """Whether it has ended in an exception, which no hook sees."""
        return self.is_running and (self._end is None or self._end() is None)

    def begin(self) -> None:
        super().begin()
        self._gathering.room.begin_backward()
        self._end = None

    def end(self) -> None:
        super().end()
        self._gathering.room.end_backward()

    def queue_end(self, end: Callable[[], None]) -> None:
        """Has torch call `end`, a new object that nobody else holds, when the backward is over."""
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    def reduce(self) -> None:
        """Parameters take gradients from here on."""
        self.state = PassState.REDUCING
