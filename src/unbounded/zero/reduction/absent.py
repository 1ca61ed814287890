"""Units that other ranks use in a backward and this one does not, because it skipped their blocks, for example.

Every rank takes part in every unit's reduction, with zeros if it has nothing, in one agreed order. A rank that waited
with that until its backward ends would hold up the others: with a few reductions in flight they go no further, and so
no longer join the gathers that it needs itself. So it takes part when its backward has passed the place of the unit's
site in the order, and not before, since by then it has issued every gather that the others need to come there.

Which units are absent, the graph says when the backward begins. Where a part of a forward ran without a graph
(reentrant checkpointing, reversible blocks), a backward inside this one may still bring gradients of its units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from unbounded.zero.parameters.views import gets_gradients
from unbounded.zero.passes.direction import RunningSite
from unbounded.zero.unit import Unit


class Absent:
    """The absent units of one backward, in the order in which units are reduced."""

    def __init__(self) -> None:
        self._without_graph: set[Unit] = set()  # used by forwards since the last backward
        self._absent: set[Unit] = set()
        self._places: dict[RunningSite, int] = {}
        self._left: deque[tuple[int, Unit]] = deque()

    def note_use(self, units: Iterable[Unit]) -> None:
        """A part of a forward with gradients uses the units where no graph is recorded."""
        self._without_graph.update(units)

    def begin(self, units: Iterable[Unit]) -> None:
        """A backward begins, and this is called inside it: in its own graph, not in that of a backward inside it."""
        trained = (unit for unit in units if unit.trainable and unit not in self._without_graph)
        self._absent = {unit for unit in trained if not gets_gradients(unit)}
        self._places, self._left = {}, deque()

    def follow(self, sites: Sequence[RunningSite]) -> None:
        """The backward reduces, in the order of `sites`. Those around others begin first and end last: never passed."""
        self._places = {site: place for place, site in enumerate(sites) if not site.is_outer}
        self._left = deque((place, unit) for place, unit in self._in_order() if unit in self._absent)

    def pass_to(self, site: RunningSite) -> list[Unit]:
        """The backward is at `site`: the absent units whose places it has passed since the last call."""
        place, passed = self._places.get(site, 0), []
        while self._left and self._left[0][0] < place:
            passed.append(self._left.popleft()[1])
        return passed

    def add_rest(self) -> None:
        """The backward gives nothing more to any unit. Those that it has reduced do no harm here."""
        self._left = deque(self._in_order())

    def end(self) -> None:
        self._without_graph.clear()
        self._absent, self._places, self._left = set(), {}, deque()

    def _in_order(self) -> Iterator[tuple[int, Unit]]:
        return ((place, unit) for site, place in self._places.items() for unit in site.units)
