"""Gathered weights: who needs a unit's, how they come to the device, and when they are freed.

A unit is gathered while anybody has a claim on it. Fetching runs in its own lane: it waits for the optimizer,
copies this rank's part from the host, and gathers the other ranks' parts. Parts on disk come by another lane, where
reading may begin before the fetch is due.

    read     | u7 from disk ----------------- | u14 from disk ------------
    fetch    | u4 | u5 | u6 |    u7 | u8 | u9 | u10
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unbounded.native.bulk import convert, new_tensor
from unbounded.ranks.axis import Axis
from unbounded.ranks.failures import Failures
from unbounded.ranks.phases import Phases, Ticket
from unbounded.tiers.lane import Handle, Lane
from unbounded.zero.delivery import Delivery
from unbounded.zero.passes.capture import refuse_capture
from unbounded.zero.passes.trail import Trail
from unbounded.zero.unit import Unit, WeightState


class AheadRoom(Protocol):
    """Says whether the device has room for so many bytes of weights, ahead of their use."""

    def begin_backward(self) -> None: ...

    def end_backward(self) -> None: ...

    def allows(self, num_bytes: int, *, is_backward: bool) -> bool: ...


class Unlimited:
    """The plan has counted them."""

    def begin_backward(self) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def allows(self, num_bytes: int, *, is_backward: bool) -> bool:
        return True


class Gathering:
    """Gathers and releases the weights of units, in the order in which it is asked to."""

    def __init__(
        self,
        ranks: Axis,
        phases: Phases,
        device: torch.device,
        lane: Lane,
        reading: Lane,
        failures: Failures,
        count_bytes: Callable[[int], None],
    ) -> None:
        self.device, self.failures = device, failures
        self._lane_ranks, self._phases = ranks.lane("gather"), phases
        self._lane, self._reading = lane, reading
        self._count_bytes, self._counting = count_bytes, threading.Lock()
        self.gathered_bytes = 0  # what units that are not resident take of the device now
        self._released = torch.cuda.Event() if device.type == "cuda" else None
        self._trail = Trail()
        self._has_joined = False
        self.room: AheadRoom = Unlimited()  # for what is read ahead
        self.holding = False  # nothing is released, because parameters are shown to the user

    def request(self, unit: Unit) -> None:
        """Starts fetching a unit's weights unless they are there, as they are or old, or being fetched."""
        if unit.state is WeightState.RELEASED or (unit.state is WeightState.STALE and self.needs_peers(unit)):
            refuse_capture(f"a fetch of the weights of unit {unit.name!r}", self.device)
            self.read_ahead(unit)  # it takes memory, so it may fail
            ticket = None
            if self.needs_peers(unit):
                self._has_joined = True
                ticket = self._phases.ticket(f"the gather of unit {unit.name!r}")  # which fails if the job has failed
            unit.state = WeightState.FETCHING
            reading, unit.reading = unit.reading, None
            unit.fetching = self._lane.submit(self._fetch, unit, reading, ticket)
            if reading is not None and unit.fetching.error is not None:
                reading.settle()  # a lane without a thread waits for nothing, and the memory is about to be freed

    def read_ahead(self, unit: Unit) -> None:
        """Starts reading this rank's part of a unit's weights if they are on disk; the unit stays released."""
        if unit.weights.tier == "disk" and unit.fetching is None and not unit.backing.is_there and not unit.reading:
            part, ready = self._make_part(unit)
            self._expect_delivery(unit, part, ready)
            unit.reading = self._reading.submit(self._bring, unit, part, ready)

    def follow(self) -> None:
        """The current stream may read what is gathered for another one, and frees it only after that one's work."""
        self._trail.follow(self.device)

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
            self._count(-unit.num_bytes)

    def release(self, unit: Unit) -> None:
        """Frees the bytes of a unit's gathered weights and every claim on them, unless it is resident."""
        unit.claims = 0
        self.drop_read(unit)
        self._give_up_failed(unit)  # and nobody is left to hear of it
        if unit.resident or self.holding or unit.state is WeightState.RELEASED:
            return
        self.order_stream(unit)
        self._free(unit)
        unit.state = WeightState.RELEASED

    def settle(self, unit: Unit) -> None:
        """Returns when what brings the unit's weights waits no longer for the last update of them."""
        for handle in (unit.reading, unit.fetching):
            if handle is not None:
                handle.settle()

    def drop_read(self, unit: Unit) -> None:
        """Frees what was read ahead of a fetch that did not come."""
        reading, unit.reading = unit.reading, None
        if reading is None:
            return
        reading.settle()
        launched = self._reading.mark()  # by a read that has failed, too
        if launched is not None:
            torch.cuda.current_stream().wait_event(launched)
        self._mark_released()  # with peers the part's memory is free as soon as nobody holds it
        if unit.backing.is_there:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        self._mark_released()
        unit.deallocate()
        self._count(-unit.num_bytes)

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
        self.follow()
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
        self.follow()
        for unit in units:
            self.request(unit)
        for unit in units:
            if unit.state is WeightState.STALE:
                self._catch_up(unit)
            else:
                self.order_stream(unit)

    def _catch_up(self, unit: Unit) -> None:
        """Waits for the update of weights that are whole here, which writes them where they are."""
        with self.failures.noting():
            self._wait_for_update(unit)
        unit.state = WeightState.GATHERED

    def complete(self, units: Sequence[Unit]) -> None:
        """All ranks of the axis must call this. Gathers what is whole on every rank and was updated."""
        self.gather([unit for unit in units if unit.resident and self.needs_peers(unit)])

    def _fetch(self, unit: Unit, reading: Handle | None, ticket: Ticket | None) -> None:
        """Runs in the fetch lane. With peers, a unit is always gathered, because they will gather it too."""
        part = None
        with self.failures.noting():
            if reading is not None:
                part = reading.order_stream()
            elif unit.resident or self._is_here(unit):
                self._wait_for_update(unit)
            else:
                if not unit.delivers:  # memory is taken only when there is something to put in
                    self._wait_for_update(unit)
                memory = self._make_part(unit)
                self._expect_delivery(unit, *memory)
                part = self._bring(unit, *memory)
        self._wait_for_releases()
        if unit.resident:
            self._gather(unit, convert(unit.owned_part(), unit.dtype, copy=True), ticket)
            return
        if part is None:  # if it is lost, zeros and not garbage until the ranks have met
            part = unit.weights.direct if self._is_here(unit) else self._make_part(unit)[0].zero_()
        if self.needs_peers(unit):
            self._allocate(unit)
            self._wait_for_releases()
            assert part is not None
            self._gather(unit, part, ticket)

    def _expect_delivery(self, unit: Unit, part: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        """Tells an update that has not ended where its new weights are waited for."""
        if unit.weights_ready is not None and not unit.weights_ready.launched():
            unit.delivery = Delivery(part, ready)

    def _bring(self, unit: Unit, part: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
        """Runs in a lane; fills this rank's part, once its memory is ready, and returns it."""
        missing = self._wait_for_update(unit)
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        for start, stop in missing:
            unit.weights.fetch(part[start:stop], start).order_stream()
        return part

    def _wait_for_update(self, unit: Unit) -> list[tuple[int, int]]:
        """Returns when the current stream may read the unit's weights in their tier, and what was not delivered."""
        try:
            if unit.weights_ready is not None:
                unit.weights_ready.order_stream()
        finally:
            delivery, unit.delivery = unit.delivery, None
        return [(0, unit.weights.numel)] if delivery is None else delivery.missing()

    def _is_here(self, unit: Unit) -> bool:
        """Whether this rank's part is on the device as it is, and only the other ranks' parts are gathered."""
        direct = unit.weights.direct
        return self.needs_peers(unit) and direct is not None and direct.device == self.device

    def _make_part(self, unit: Unit) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Memory for this rank's part (the unit's own if it is all of it), and when other streams may use it. Whoever
        asks, it belongs to the fetch lane's stream: the allocator gives what a stream has freed to no other stream."""
        stream = self._lane.stream
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if self.needs_peers(unit):
                part = new_tensor(unit.weights.numel, unit.dtype, self.device)
            else:
                self._allocate(unit)
                part = unit.buffer
            self._wait_for_releases()
        return part, self._lane.mark()

    def _allocate(self, unit: Unit) -> None:
        if not unit.backing.is_there:
            unit.allocate()
            self._count(unit.num_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.gathered_bytes += num_bytes
        self._count_bytes(num_bytes)

    def _wait_for_releases(self) -> None:
        """What was freed may still be in use by work that is queued on the device."""
        if self._released is not None:
            torch.cuda.current_stream().wait_event(self._released)

    def _gather(self, unit: Unit, shard: torch.Tensor, ticket: Ticket | None) -> None:
        if ticket is not None:
            ticket.wait()
        self._lane_ranks.gather(unit.buffer, shard, unit.name)

    def needs_peers(self, unit: Unit) -> bool:
        """Whether other ranks hold a part of the unit."""
        return not unit.is_whole

    def has_joined(self) -> bool:
        """Whether this rank has joined a gather since it was last asked."""
        joined, self._has_joined = self._has_joined, False
        return joined
