"""From the gradients of one unit's backward to the owned part of their mean, on its tier.

    backward   | u3 |    | u2 |    | u1 |
    reduce          | u3 |    | u2 |    | u1 |     reduce-scatter, then to the gradient's tier

With several ranks a unit is reduced once a backward, when its last use has fired or at the end, and units are
reduced in one agreed order, with zeros where a rank has nothing and in a dtype that follows from what all ranks
know: no difference between the ranks' own passes can make them meet in different reductions. With `defer` (stage 1,
and inside `no_sync`) whole local gradients are added up instead and reduced later, in fp32.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from unbounded.errors import StateError
from unbounded.tiers.lane import Handle, Lane
from unbounded.tiers.pool import BufferPool
from unbounded.zero.collectives import Ranks
from unbounded.zero.gradient import Allocate
from unbounded.zero.unit import Unit

_is_there = partial(operator.is_not, None)
# Whole gradients on their way at once: more would be the full set that partitioning and offloading avoid.
IN_FLIGHT = 4


class Reduction:
    """The reduce lane. `replicate` gives every rank the whole mean (stage 0)."""

    def __init__(self, ranks: Ranks, lane: Lane, bounce: BufferPool, *, replicate: bool) -> None:
        self.ranks, self.lane, self.bounce, self.replicate = ranks, lane, bounce, replicate
        self.measure = False  # take the norm as gradients pass: set once somebody has asked for it
        self.allocate: dict[str, Allocate] = {}
        self._in_flight: deque[Handle] = deque()
        self._waiting: list[Unit] = []
        self._ready: set[Unit] = set()
        self._deferred = False  # a backward was, and no reduction has followed

    def begin(self, order: Sequence[Unit]) -> None:
        """A backward starts; its reductions will be launched in `order`."""
        self._waiting = [unit for unit in order if unit.trainable] if self.ranks.size > 1 else []
        self._ready.clear()

    def defer(self) -> None:
        """A backward starts whose gradients are reduced later."""
        self._deferred = True

    def collect(self, unit: Unit, gradients: Sequence[torch.Tensor | None], *, complete: bool, defer: bool) -> None:
        """Takes the gradients of one use of `unit`, on the thread and stream of the backward."""
        if unit.gradient.consumed or unit.gradient.clipped:
            raise StateError(
                f"the gradient of unit {unit.name!r} was clipped, scaled or used up by clip_grad_norm_, last_backward "
                "or the last optimizer.step(), so this backward cannot add to it. Clip behind the last backward of a "
                "step, and call optimizer.zero_grad() after each step."
            )
        if unit.frozen:
            gradients = [None if index in unit.frozen else gradient for index, gradient in enumerate(gradients)]
        full = self._flatten(unit, gradients)
        if unit.unreduced is not None:
            full = unit.unreduced.to(torch.promote_types(full.dtype, torch.float32)).add_(full)
        if self.ranks.size == 1 and not defer:
            unit.unreduced = None
            self._submit(unit, full)
            return
        unit.unreduced = full
        if complete and not defer:
            self._ready.add(unit)
            self._launch()

    def end(self) -> None:
        """The backward is over: whatever was not launched is, with zeros where this rank has nothing."""
        self._ready.update(self._waiting)
        self._launch()
        self._deferred = False

    def abandon(self) -> None:
        """The backward broke off: what was collected stays, as in plain PyTorch, for the next reduction."""
        self._waiting = []

    def flush(self, unit: Unit, *, wide: bool) -> None:
        """All ranks of the axis must call this, alike. Reduces what was collected; zeros where this rank has nothing.

        `wide` says whether any rank may have a sum of several backwards; uses in one are rounded once, like one.
        """
        dtype = torch.promote_types(unit.dtype, torch.float32) if wide else unit.dtype
        full, unit.unreduced = unit.unreduced, None
        if full is None:
            full = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.device)
        self._submit(unit, full.to(dtype))

    def forget(self) -> None:
        """Nothing waits for a reduction any more."""
        self._deferred = False

    def _launch(self) -> None:
        while self._waiting and self._waiting[0] in self._ready:
            self.flush(self._waiting.pop(0), wide=self._deferred)

    def _submit(self, unit: Unit, full: torch.Tensor) -> None:
        if self.ranks.size == 1 and unit.gradient.tier == "device":
            self._land(unit, full)
            return
        ready = None
        if full.device.type == "cuda" and self.lane.stream is not None:
            ready = torch.cuda.Event()
            ready.record()
            full.record_stream(self.lane.stream)
        while len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().finish()
        unit.gradient.handle = self.lane.submit(self._reduce, unit, full, ready, unit.gradient.handle)
        self._in_flight.append(unit.gradient.handle)

    def _reduce(self, unit: Unit, full: torch.Tensor, ready: torch.cuda.Event | None, before: Handle | None) -> None:
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        if self.ranks.size > 1:
            shard = torch.empty(unit.layout.shard_numel, dtype=full.dtype, device=full.device)
            self.ranks.reduce(shard, full, unit.name)
            if self.replicate:
                self.ranks.gather(full, shard, unit.name)
            else:
                full = shard
        if before is not None:
            before.wait()  # a gradient of which a part was lost stays failed
        self._land(unit, full)

    def _land(self, unit: Unit, owned: torch.Tensor) -> None:
        unit.gradient.add(owned, self.allocate[unit.gradient.tier], self.bounce, measure=self.measure)

    def _flatten(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        whole = all(map(_is_there, gradients))
        make = torch.zeros if unit.layout.numel != unit.numel or not whole else torch.empty
        full = make(unit.layout.numel, dtype=unit.dtype, device=unit.device)
        views = unit.slot_views(full)
        if whole:
            unit.used = bytearray(b"\x01") * len(unit.used)
            torch._foreach_copy_(views, list(gradients))  # type: ignore[arg-type]
            return full
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                unit.used[index] = True
                views[index].copy_(gradient)
        return full
