"""Gathered weights: who needs a unit's, how they come to the device, and when they are freed.

A unit is gathered while anybody has a claim on it. Fetching runs in its own lane: it waits for the optimizer,
reads the unit's tier, and gathers the other ranks' parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unbounded.native.bulk import convert, new_tensor
from unbounded.ranks.axis import Axis
from unbounded.ranks.failures import Failures
from unbounded.ranks.phases import Phases, Ticket
from unbounded.tiers.lane import Lane
from unbounded.zero.unit import Unit, WeightState


class Gathering:
    """Gathers and releases the weights of units, in the order in which it is asked to."""

    def __init__(
        self,
        ranks: Axis,
        phases: Phases,
        device: torch.device,
        lane: Lane,
        failures: Failures,
        count_bytes: Callable[[int], None],
    ) -> None:
        self.device, self.failures = device, failures
        self._lane_ranks, self._phases, self._lane = ranks.lane("gather"), phases, lane
        self._count_bytes = count_bytes
        self._released = torch.cuda.Event() if device.type == "cuda" else None
        self._has_joined = False
        self.holding = False  # nothing is released, because parameters are shown to the user

    def request(self, unit: Unit) -> None:
        """Starts fetching a unit's weights unless they are there or being fetched."""
        if unit.state in (WeightState.RELEASED, WeightState.STALE):
            unit.state = WeightState.FETCHING
            ticket = None
            if self.needs_peers(unit):
                self._has_joined = True
                ticket = self._phases.ticket(f"the gather of unit {unit.name!r}")
            unit.fetching = self._lane.submit(self._fetch, unit, ticket)

    def order_stream(self, unit: Unit) -> None:
        """Returns when the current stream may read the unit's weights."""
        if unit.state is WeightState.FETCHING:
            handle = unit.fetching
            assert handle is not None
            self._give_up_failed(unit)
            handle.order_stream()
            unit.state, unit.fetching = WeightState.GATHERED, None

    def _give_up_failed(self, unit: Unit) -> None:
        """If a fetch failed, the next request tries again."""
        if unit.fetching is None or not unit.fetching.failed():
            return
        unit.state, unit.fetching = WeightState.STALE if unit.resident else WeightState.RELEASED, None
        if not unit.resident and unit.backing.is_there:
            unit.deallocate()
            self._count_bytes(-unit.num_bytes)

    def release(self, unit: Unit) -> None:
        """Frees the bytes of a unit's gathered weights and every claim on them, unless it is resident."""
        unit.claims = 0
        self._give_up_failed(unit)  # and nobody is left to hear of it
        if unit.resident or self.holding or unit.state is WeightState.RELEASED:
            return
        self.order_stream(unit)
        self._mark_released()
        unit.deallocate()
        unit.state = WeightState.RELEASED
        self._count_bytes(-unit.num_bytes)

    def invalidate(self, unit: Unit) -> None:
        """The unit's owned weights are being updated: what was gathered from them is stale."""
        if unit.resident:
            self.order_stream(unit)  # a running gather still reads the old ones
            unit.state = WeightState.STALE
        else:
            self.release(unit)
        self._mark_released()  # after an update on this stream, which a gather must not read at the same time

    def _mark_released(self) -> None:
        """Makes fetches begin after this stream's queued work."""
        if self._released is not None:
            self._released.record()

    def claim(self, units: Sequence[Unit]) -> None:
        """Starts fetching units that will be needed; each stays until its claims are dropped."""
        for unit in units:
            unit.claims += 1
            self.request(unit)

    def claim_alone(self, units: Sequence[Unit]) -> None:
        """Claims units outside the agreed order, after making sure that every rank is about to do the same."""
        for unit in units:
            if unit.state in (WeightState.RELEASED, WeightState.STALE) and self.needs_peers(unit):
                self._phases.confirm(
                    f"the gather of unit {unit.name!r} outside the agreed order: it runs more often, or at another "
                    "place, than before, which it must do on all ranks"
                )
        self.claim(units)

    def drop(self, units: Sequence[Unit]) -> None:
        """Drops one claim on each unit; the last one frees it."""
        for unit in units:
            unit.claims -= 1
            if unit.claims <= 0:
                self.release(unit)

    def gather(self, units: Sequence[Unit]) -> None:
        """Returns when the current stream may read the weights of all of them."""
        for unit in units:
            self.request(unit)
        for unit in units:
            self.order_stream(unit)

    def complete(self, units: Sequence[Unit]) -> None:
        """All ranks of the axis must call this. Gathers what is whole on every rank and was updated."""
        self.gather([unit for unit in units if unit.resident and self.needs_peers(unit)])

    def _fetch(self, unit: Unit, ticket: Ticket | None) -> None:
        """Runs in the fetch lane. With peers, a unit is always gathered, because they will gather it too."""
        with self.failures.noting():
            if unit.weights_ready is not None:
                unit.weights_ready.order_stream()
        if not unit.resident:
            unit.allocate()
            self._count_bytes(unit.num_bytes)
        if self._released is not None:
            torch.cuda.current_stream().wait_event(self._released)
        if unit.resident:
            if self.needs_peers(unit):
                self._gather(unit, convert(unit.owned_part(), unit.dtype, copy=True), ticket)
        elif self.needs_peers(unit):
            shard = unit.weights.direct
            if shard is None or shard.device != self.device:
                shard = new_tensor(unit.weights.numel, unit.dtype, self.device)
                self._fetch_owned(unit, shard)
            self._gather(unit, shard, ticket)
        else:
            self._fetch_owned(unit, unit.buffer)

    def _gather(self, unit: Unit, shard: torch.Tensor, ticket: Ticket | None) -> None:
        if ticket is not None:
            ticket.wait()
        self._lane_ranks.gather(unit.buffer, shard, unit.name)

    def _fetch_owned(self, unit: Unit, target: torch.Tensor) -> None:
        """Makes the lane's stream wait for the copy; the host waits only if the disk is read."""
        with self.failures.noting():
            unit.weights.fetch(target).order_stream()
            return
        target.zero_()  # the read failed: zeros and not garbage until the ranks have met

    def needs_peers(self, unit: Unit) -> bool:
        """Whether other ranks hold a part of the unit."""
        return not unit.is_whole

    def has_joined(self) -> bool:
        """Whether this rank has joined a gather since it was last asked."""
        joined, self._has_joined = self._has_joined, False
        return joined
