"""Turns the gradients of one unit's backward into the owned part of their mean, on its tier.

    backward   | u3 |    | u2 |    | u1 |
    reduce          | u3 |    | u2 |    | u1 |     reduce-scatter, then to the gradient's tier

With several ranks a unit is reduced once per backward, when its last use has fired, when a backward without it has
passed its place, or at the end. Units are reduced in one agreed order, with zeros if a rank has nothing, and in a dtype
that follows from what all ranks know. So whatever the ranks' own passes do, they meet in the same reductions. With
`defer` (stage 1, and inside `no_sync`) whole local gradients are added up instead and reduced later, in fp32.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from unbounded.errors import StateError
from unbounded.native.bulk import convert, new_tensor
from unbounded.ranks.axis import Axis
from unbounded.ranks.phases import Phases, Ticket
from unbounded.tiers.lane import Handle, Lane
from unbounded.zero.gradients.gradient_value import GradientState
from unbounded.zero.parameters.parameter import call_hooks
from unbounded.zero.passes.trail import Trail
from unbounded.zero.unit import Unit

_is_there = partial(operator.is_not, None)
_layout = operator.attrgetter("layout")
# Whole gradients in flight at once: more would be the full set that partitioning and offloading avoid.
IN_FLIGHT = 4


class Reduction:
    """The reduce lane. `replicate` gives every rank the whole mean (stage 0)."""

    def __init__(self, ranks: Axis, phases: Phases, lane: Lane, *, replicate: bool) -> None:
        self._phases = phases
        self.ranks, self.lane, self.replicate = ranks, lane, replicate
        self.on_final: weakref.WeakMethod[Callable[[Unit], None]] | None = None  # who is notified of final gradients
        self.on_end: weakref.WeakMethod[Callable[[], None]] | None = None  # and of the end of a backward
        self.at_once = False  # gradients are taken as soon as they are final, and none is stored
        self.measure = False  # take the norm as gradients pass: set once somebody has asked for it
        self._in_flight: deque[Handle] = deque()
        self._waiting: list[Unit] = []
        self._ready: set[Unit] = set()
        self._fresh: dict[Unit, tuple[torch.Tensor, bytes]] = {}  # of this backward alone, and whose, for users' hooks
        self._trail = Trail()  # of the streams on which this backward gives gradients
        self._is_deferred = False  # a backward has been deferred and not reduced yet

    def begin(self, order: Sequence[Unit]) -> None:
        """A backward starts; its reductions will be launched in `order`. Nothing is left of one whose end failed."""
        self.abandon()
        is_ordered = self.ranks.size > 1 or self.at_once
        self._waiting = [unit for unit in order if unit.trainable] if is_ordered else []
        self._ready.clear()

    def defer(self) -> None:
        """A backward starts whose gradients are reduced later."""
        self.abandon()
        self._is_deferred = True

    def collect(self, unit: Unit, gradients: Sequence[torch.Tensor | None], *, defer: bool) -> None:
        """Takes the gradients of one use of `unit`, on the thread and stream of the backward."""
        gradient = unit.gradient
        if gradient.state is GradientState.SPENT:
            raise StateError(
                f"the gradient of unit {unit.name!r} was used up by an update inside a backward, so this one cannot "
                "add to it. Call optimizer.zero_grad() after each step; announce the last backward of a step alone "
                '(last_backward()), and where a step has several, keep gradients: gradients="host" instead of "none".'
            )
        _refuse_sparse(unit, gradients)
        if unit.views.frozen:
            gradients = [None if i in unit.views.frozen else part for i, part in enumerate(gradients)]
        full, given = _flatten(unit, gradients)
        self._trail.follow(full.device)
        if unit.views.hooks:  # they see the result of a whole backward
            held, earlier = self._fresh.get(unit, (None, bytes(len(given))))
            self._fresh[unit] = _add(held, full), bytes(map(operator.or_, earlier, given))
        else:
            self._take(unit, full, given, defer=defer)

    def adopt(self, unit: Unit, gradients: Sequence[torch.Tensor | None], *, defer: bool) -> None:
        """Takes the gradients of an earlier backward, which has called users' hooks already."""
        self._take(unit, *_flatten(unit, gradients), defer=defer)

    def complete(self, unit: Unit, *, defer: bool) -> None:
        """The backward has no more uses of `unit`: its hooks run, and its gradient may be reduced.

        Autograd calls this on the stream that was current in `shard`, whichever one the gradients are on.
        """
        stream = self._trail.stream
        with nullcontext() if stream is None or self._trail.is_current(stream.device) else torch.cuda.stream(stream):
            self._complete(unit, defer=defer)

    def _complete(self, unit: Unit, *, defer: bool) -> None:
        if unit in self._fresh:
            full, given = self._fresh.pop(unit)
            _call_hooks(unit, full, given)
            self._take(unit, full, given, defer=defer)
        if defer:
            return
        if self.ranks.size > 1:
            self._ready.add(unit)
            self._launch()
        elif self.at_once:
            self._flush_own(unit)
        else:
            self._tell_final(unit)

    def _flush_own(self, unit: Unit) -> None:
        """On one rank: the sum of all uses of `unit`, in fp32 if there were several, as a stored sum would be."""
        local = unit.gradient.local
        if local is not None:
            self.flush(unit, wide=local.dtype != unit.dtype)
            self._tell_final(unit)

    def _take(self, unit: Unit, full: torch.Tensor, given: bytes, *, defer: bool) -> None:
        unit.gradient.mark_used(map(operator.or_, unit.gradient.used, given))
        full = _add(unit.gradient.local, full)
        if self.ranks.size == 1 and not defer and not self.at_once:
            unit.gradient.take_local()
            self._submit(unit, full)
        else:
            unit.gradient.hold_local(full)

    def join(self, units: Iterable[Unit]) -> None:
        """The backward has passed units to which it gives nothing: their reductions need not wait for its end."""
        self._ready.update(units)
        self._launch()

    def complete_rest(self, *, defer: bool) -> None:
        """The backward is over, so no unit has more uses in it.

        The stream of whoever has called it waits for those that gave gradients. Torch sees to that for leaves alone,
        which get none here.
        """
        if self._trail.stream is not None:
            self._trail.follow(self._trail.stream.device)
        for unit in list(self._fresh):
            self.complete(unit, defer=defer)

    def end(self, *, defer: bool) -> None:
        """Launches the rest, with zeros if this rank has nothing."""
        if defer:
            return
        if self.ranks.size == 1:
            for unit in self._waiting:
                self._flush_own(unit)
        else:
            self._ready.update(self._waiting)
            self._launch()
        self._is_deferred = False
        over = self.on_end() if self.on_end is not None else None
        if over is not None:
            over()

    def abandon(self) -> None:
        """The backward was interrupted: what was collected stays for the next reduction, as in plain PyTorch."""
        self._waiting = []
        self._fresh.clear()
        self._trail.end()

    def flush(self, unit: Unit, *, wide: bool) -> None:
        """All ranks of the axis must call this. Reduces what was collected, or zeros if this rank has nothing.

        `wide` says whether any rank may have a sum of several backwards; uses in one are rounded once, like one.
        """
        dtype = torch.promote_types(unit.dtype, torch.float32) if wide else unit.dtype
        full = unit.gradient.take_local()
        if full is None:
            full = new_tensor(unit.layout.numel, dtype, unit.device).zero_()
        self._submit(unit, convert(full, dtype))

    def forget(self) -> None:
        """Nothing waits for a reduction any more."""
        self._is_deferred = False

    def restore(
        self, unit: Unit, reduced: torch.Tensor | None, unreduced: torch.Tensor | None, used: Sequence[bool]
    ) -> None:
        """Restores gradients of a checkpoint that no step had used yet.

        `reduced` is this rank's part of the mean, `unreduced` its own gradients that wait for a reduction.
        """
        if reduced is not None:
            unit.gradient.add(reduced.to(unit.device), measure=self.measure)
        unit.gradient.restore(used, unreduced)

    def _launch(self) -> None:
        while self._waiting and self._waiting[0] in self._ready:
            unit = self._waiting.pop(0)
            self.flush(unit, wide=self._is_deferred)
            self._tell_final(unit)

    def _tell_final(self, unit: Unit) -> None:
        """This backward adds nothing more to the gradient of `unit`, which is being brought to its tier."""
        tell = self.on_final() if self.on_final is not None else None
        if tell is not None:
            tell(unit)

    def _submit(self, unit: Unit, full: torch.Tensor) -> None:
        if self.ranks.size == 1 and unit.gradient.tier == "device":
            unit.gradient.add(full, measure=self.measure)
            return
        ready = squares = None
        if full.device.type == "cuda" and self.lane.stream is not None:
            # Here, because each stream that takes memory has some of its own.
            squares = unit.gradient.measure_early(full) if self.measure and self.ranks.size == 1 else None
            ready = torch.cuda.Event()
            ready.record()
            full.record_stream(self.lane.stream)
        while len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().finish()
        ticket = self._phases.ticket(f"the reduction of unit {unit.name!r}")
        unit.gradient.adding = self.lane.submit(self._reduce, unit, full, squares, ready, unit.gradient.adding, ticket)
        self._in_flight.append(unit.gradient.adding)

    def _reduce(
        self,
        unit: Unit,
        full: torch.Tensor,
        squares: torch.Tensor | float | None,
        ready: torch.cuda.Event | None,
        before: Handle | None,
        ticket: Ticket | None,
    ) -> None:
        if ticket is not None:
            ticket.wait()
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        if self.ranks.size > 1:
            if self.at_once:
                self._agree_used(unit)
            shard = new_tensor(unit.layout.shard_numel, full.dtype, full.device)
            self.ranks.reduce(shard, full, unit.name)
            if self.replicate:
                self.ranks.gather(full, shard, unit.name)
            else:
                full = shard
        if before is not None:
            before.order_stream()  # a gradient of which a part was lost stays failed
        unit.gradient.add(full, measure=self.measure, squares=squares)

    def _agree_used(self, unit: Unit) -> None:
        """Which parameters have a gradient on any rank: where gradients are stored, ranks agree before the step."""
        used = torch.frombuffer(unit.gradient.used, dtype=torch.uint8).to(unit.device, copy=True)
        voted = self.ranks.max(used, "the vote on who has a gradient")
        unit.gradient.mark_used(voted.cpu().numpy().tobytes())


def _refuse_sparse(unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
    if {*map(_layout, filter(_is_there, gradients))} <= {torch.strided}:  # a loop in C: this runs in every backward
        return
    for slot, gradient in zip(unit.layout.slots, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise StateError(
                f"the gradient of {slot.name!r} is sparse, which cannot be reduced over flat buffers. Leave out "
                "sparse=True where the forward uses it (torch.nn.functional.embedding)."
            )


def _flatten(unit: Unit, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, bytes]:
    """The gradients as one tensor, with zeros where there is none, and which there are."""
    full, given = new_tensor(unit.layout.numel, unit.dtype, unit.device), bytes(map(_is_there, gradients))
    views = unit.slot_views(full)
    if all(given):
        unit.clear_padding(full)
        torch._foreach_copy_(views, list(gradients))  # type: ignore[arg-type]
        return full, given
    full.zero_()
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is not None:
            view.copy_(gradient)
    return full, given


def _add(held: torch.Tensor | None, fresh: torch.Tensor) -> torch.Tensor:
    """The sum of several uses or backwards, in fp32 or wider; a single one stays as it is."""
    return fresh if held is None else convert(held, torch.promote_types(fresh.dtype, torch.float32)).add_(fresh)


def _call_hooks(unit: Unit, full: torch.Tensor, given: bytes) -> None:
    """Calls users' hooks with the gradients that this backward has given, in the parameter's dtype."""
    for index, part in enumerate(unit.slot_views(full)):
        hooks = unit.views.hooks.get(index)
        if hooks and given[index]:
            part.copy_(call_hooks(hooks, part.to(unit.dtype, copy=True)))
