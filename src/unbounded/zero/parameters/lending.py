"""The values of single parameters, outside their module's forward: lent to read, copied for state dicts, written back.

Inside a forward modules hold views of the gathered buffer (`views`); this is for everything else that users do with one
parameter at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from unbounded.errors import StateError
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import join_cut
from unbounded.ranks.phases import Phases
from unbounded.zero.parameters.state_dict_copies import StateDictCopies
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.turns import in_turn
from unbounded.zero.unit import Unit, WeightState


class Running(Protocol):
    """The engine as lending sees it."""

    def turn(self) -> AbstractContextManager[None]: ...

    def check_weights(self, unit: Unit) -> None: ...

    def recover(self) -> None: ...

    def is_in_pass(self) -> bool: ...

    def is_held(self, unit: Unit) -> bool: ...

    def raise_failures(self) -> None: ...


class Lending:
    """Lends values of the parameters of one model. `tensor` is the axis that may cut them."""

    def __init__(
        self, engine: Running, gathering: Gathering, writes: Writes, phases: Phases, *, num_ranks: int, tensor: Axis
    ) -> None:
        self.copies = StateDictCopies()
        self.engine, self._gathering, self._writes, self._phases = engine, gathering, writes, phases
        self._num_ranks, self._tensor = num_ranks, tensor
        self._looked_at: Unit | None = None  # gathered for a look from outside, until another look or a pass

    @in_turn
    def borrow(self, unit: Unit, index: int, *, from_all: bool = False) -> torch.Tensor:
        """The value of one parameter for a computation outside its module's forward.

        Inside the model's own code, and in a loss, every rank does the same; `from_all` says so of a copy of the model.
        A look from outside may be on one rank only, which must not wait for others. Outside a pass the value is a copy,
        unless the unit is resident: nothing that lasts may alias bytes that are freed.
        """
        self.engine.check_weights(unit)
        in_pass = self.engine.is_in_pass()
        wants_graph = torch.is_grad_enabled() and unit.trainable and unit.views.parameters[index].requires_grad
        if not (in_pass or wants_graph or from_all):
            self._refuse_partitioned(unit, index)
        if not in_pass:
            self.copies.settle_unit(unit)
        self._gather(unit, until_settled=in_pass or wants_graph, is_agreed=from_all)
        # Not a tensor of inference mode, whose writes are not counted.
        with torch.inference_mode(False), torch.set_grad_enabled(wants_graph):
            value = unit.views.make()[unit.picks[index]]
            if wants_graph:
                return _refusing_writes(value if in_pass or unit.resident else value.clone())
            is_lasting = unit.resident and not unit.has_master
            if is_lasting:
                unit.make_way()
            return value.data if is_lasting or (in_pass and not unit.resident) else value.clone()

    @in_turn
    def snapshot(self, unit: Unit, index: int) -> torch.Tensor:
        """All ranks of the axis must call this. A parameter's value for a state dict, on the host."""
        self.engine.recover()
        with torch.inference_mode(False), torch.no_grad(), self._phases.during("model.state_dict()"):
            value = self.borrow(unit, index, from_all=True)
            self.engine.raise_failures()
            cut = unit.layout.slots[index].cut
            if cut is not None:  # a copy of the whole, from which no write goes back
                return join_cut(cut, value, self._tensor).cpu()
            return self.copies.take(unit, index, value)

    @in_turn
    def keep(self, unit: Unit, index: int, value: torch.Tensor, *, from_all: bool = False) -> None:
        """Brings a new value of a parameter to its tier."""
        self.engine.check_weights(unit)
        value = value.data
        if not (from_all or self.engine.is_in_pass()):
            self._refuse_partitioned(unit, index)
        self._writes.keep(unit, index, value)
        if unit.state is WeightState.GATHERED:
            unit.slot_views(unit.buffer)[index].copy_(value)

    @in_turn
    def overwrite(self, unit: Unit, index: int, value: torch.Tensor, *, from_all: bool) -> None:
        """Brings a new value of a parameter to its tier, whatever was written to copies of the old one."""
        self.copies.replace(unit, index)
        if unit.is_whole:
            self.copies.settle_unit(unit)  # what was written to copies of its neighbours is of these weights
        self.keep(unit, index, value, from_all=from_all)

    def forget_look(self) -> None:
        """Forgets what was gathered for a look; the caller releases it."""
        self._looked_at = None

    def _refuse_partitioned(self, unit: Unit, index: int) -> None:
        is_there = unit.state not in (WeightState.RELEASED, WeightState.STALE)
        if not is_there and self._gathering.needs_peers(unit):
            raise StateError(
                f"the parameter {unit.layout.slots[index].name!r} is partitioned over {self._num_ranks} ranks and not "
                "gathered outside a forward. Read or change it inside `with unbounded.full_params(model):` on every "
                "rank. An optimizer that is to train it is given to `shard`."
            )

    def _gather(self, unit: Unit, *, until_settled: bool, is_agreed: bool) -> None:
        """Gathers a unit for a look and releases the last one: a loop over all parameters takes unit after unit."""
        if self.engine.is_held(unit):
            return
        if until_settled or unit is not self._looked_at:
            before = self._looked_at
            (self._gathering.claim if is_agreed else self._gathering.claim_alone)([unit])
            if not until_settled:
                self._looked_at = unit
                if before is not None:
                    self._gathering.drop([before])
        self._gathering.gather([unit])


def _refusing_writes(value: torch.Tensor) -> torch.Tensor:
    """The same tensor as one of several views, which autograd lets nobody write to in place, as with a leaf."""
    return value.unsqueeze(0).unbind(0)[0]
