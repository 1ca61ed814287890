"""What ranks agree on about gradients before a step: who has one, what is left to reduce, norms, whole gradients."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch

from unbounded.errors import StateError
from unbounded.native.bulk import new_tensor
from unbounded.ranks.failures import Failures
from unbounded.ranks.mesh import Axes
from unbounded.ranks.phases import Phases
from unbounded.zero.gradients.use import Vote
from unbounded.zero.passes.order import Order
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.unit import Unit

# How many parameters without a gradient an error names.
NUM_NAMED = 3


class GradientAgreement:
    """The gradients of all `units`, over the ranks of the data axis. `orders` are those of its passes."""

    def __init__(
        self,
        units: Sequence[Unit],
        orders: Sequence[Order],
        axes: Axes,
        device: torch.device,
        phases: Phases,
        reduction: Reduction,
        failures: Failures,
    ) -> None:
        self._units, self._orders = units, orders
        self._axes, self._ranks, self._device = axes, axes.data, device
        self._phases, self._reduction, self._failures = phases, reduction, failures
        self._votes = axes.data.lane("votes", "gloo")
        self._vote: Vote | None = None  # the last one, perhaps in flight
        self._is_voted = True  # on every gradient that backwards have given
        self._norms: dict[Unit, tuple[int, torch.Tensor]] = {}  # of single parameters' gradients, while these last

    def adopt(self) -> None:
        """Takes over gradients that parameters had before `shard`, like those of a backward that was not reduced."""
        for unit in self._units:
            found, unit.views.first_gradients = unit.views.first_gradients, []
            if unit.trainable and any(gradient is not None for gradient in found):
                self._reduction.adopt(unit, found, defer=self._ranks.size > 1)
                self.expect_vote()

    def expect_vote(self) -> None:
        """Ranks have gradients on which they have not voted yet, so each knows only its own."""
        self._is_voted = False

    def describe(self) -> str:
        """Which gradients the next step will use, in words."""
        num_held, missing = 0, dict[str, None]()
        for unit in self._units:
            if unit.trainable:
                used = unit.gradient.used
                num_held += sum(map(bool, used))
                if not all(used):
                    names = (slot.name for slot, flag in zip(unit.layout.slots, used, strict=True) if not flag)
                    missing.update(dict.fromkeys(names))
        return f"gradients of {num_held} parameters{describe_missing([*missing]) if num_held else ''}"

    def describe_voted(self) -> str:
        """The same on all ranks, unless one of them has cleared or made gradients since the vote.

        A rank without any does not know whether others have some from `no_sync`.
        """
        has_any = any(any(unit.gradient.used) for unit in self._units if unit.trainable)
        return self.describe() if self._is_voted and has_any else "gradients without a vote"

    def vote(self) -> None:
        """All ranks of the axis must call this at the end of a backward outside `no_sync`. Waits for nobody.

        From now on, whoever asks which parameters have a gradient gets what is so on any rank.
        """
        self._is_voted = not self._reduction.at_once  # which votes unit by unit, perhaps still in flight
        if self._ranks.size == 1 or self._reduction.at_once:
            return
        self._end_vote()
        gradients = [unit.gradient for unit in self._units if unit.trainable]
        flags = [bytes(gradient.used) for gradient in gradients]
        self._vote = Vote(self._votes, b"".join(flags), self._phases.ticket("a backward"))
        places = itertools.accumulate(map(len, flags), initial=0)
        for gradient, start in zip(gradients, places, strict=False):
            gradient.expect_vote(self._vote, start)

    def _end_vote(self) -> None:
        """Returns when the last vote is over, whether or not anybody has asked for it."""
        vote, self._vote = self._vote, None
        if vote is not None:
            vote.result()

    def finish(self) -> None:
        """All ranks of the axis must call this. Makes the ranks agree on which parameters have a gradient and reduces
        what was deferred. If the passes of all ranks went alike, each adopts its order.
        """
        self._end_vote()
        trainable = [unit for unit in self._units if unit.trainable]
        for unit, held in zip(trainable, self._agree(trainable), strict=True):
            if held:
                self._reduction.flush(unit, wide=held > 1)
        self._reduction.forget()
        self._is_voted = True
        for unit in trainable:
            with self._failures.noting():
                unit.gradient.order_stream()

    def growth_bytes(self) -> int:
        """What gradients on the device will grow by in the next backward."""
        return sum(unit.gradient.growth_bytes for unit in self._units if unit.trainable)

    def slot_norms(self, unit: Unit) -> torch.Tensor:
        """All ranks of the axis must call this. The norm of every parameter's gradient, over all ranks.

        Where it has changed, so have those of most units, and who clips asks for one after the other: all are made.
        """
        gradient = unit.gradient
        gradient.refuse_spent()
        gradient.order_stream()  # what is being added counts
        if not self._is_measured(unit) or gradient.is_lent:
            with self._phases.during(f"the norm of the gradient of unit {unit.name!r}"):
                self.finish()
            others = (other for other in self._units if other is not unit and other.gradient.is_present)
            self._measure([unit, *(other for other in others if not self._is_measured(other))])
        return self._norms[unit][1]

    def _is_measured(self, unit: Unit) -> bool:
        return unit in self._norms and self._norms[unit][0] == unit.gradient.changes

    def _measure(self, units: Sequence[Unit]) -> None:
        """All ranks of the axis must call this. Notes the norms of all parameters' gradients in `units`."""
        units = sorted(units, key=lambda unit: unit.is_whole)  # parts first
        squares = [unit.gradient.slot_squares() for unit in units]
        total = _to_doubles(list(itertools.chain.from_iterable(squares)), self._device)
        if num_parts := sum(len(unit.layout.slots) for unit in units if not unit.is_whole):
            total = torch.cat([self._ranks.sum(total[:num_parts]), total[num_parts:]])
        norms = self._sum_over_model(units, total).sqrt().split([len(part) for part in squares])
        for unit, norm in zip(units, norms, strict=True):
            dtype = torch.promote_types(unit.gradient.store.dtype, torch.float32)  # the same digits on every tier
            self._norms[unit] = unit.gradient.changes, norm.to(dtype)

    def lend(self, unit: Unit) -> None:
        """All ranks of the axis must call this, inside full_params. Gives the user the whole gradient of `unit`."""
        gradient, text = unit.gradient, f"the gradient of unit {unit.name!r}, used inside unbounded.full_params()"
        with self._phases.together(text):
            self.finish()
            is_cut = any(slot.cut is not None for slot in unit.layout.slots)
            if not gradient.is_present or (gradient.is_whole and not is_cut):
                return
            gradient.write_out()
            whole = own = gradient.store.copy(0, gradient.store.numel).to(self._device)
            if not gradient.is_whole:
                whole = new_tensor(unit.layout.numel, own.dtype, self._device)
                self._ranks.gather(whole, own, unit.name)
            gradient.lend_whole(whole, self._axes.tensor)

    def _agree(self, units: Sequence[Unit]) -> list[int]:
        """What any rank still has to reduce of each unit: 0 is nothing, 1 a gradient, 2 a sum of several."""
        locals_ = [unit.gradient.local for unit in units]
        held = [0 if local is None else 1 + (local.dtype != u.dtype) for local, u in zip(locals_, units, strict=True)]
        if self._ranks.size == 1:
            return held
        used = itertools.chain.from_iterable(unit.gradient.used for unit in units)
        marks = [order.mark for order in self._orders]
        said = [*used, *held, *marks, *(-mark for mark in marks)]
        votes = torch.tensor(said, dtype=torch.int64, device=self._device)
        agreed = iter(self._ranks.max(votes).tolist())
        for unit in units:
            unit.gradient.mark_used(itertools.islice(agreed, len(unit.gradient.used)))
        held = list(itertools.islice(agreed, len(units)))
        for unit, num_held in zip(units, held, strict=True):
            if not num_held:
                unit.gradient.join_zeros()
        greatest = list(itertools.islice(agreed, len(marks)))
        if greatest == [-least for least in agreed]:
            for order in self._orders:
                order.adopt(keep_all=True)
        return held

    def _sum_over_model(self, units: Sequence[Unit], squares: torch.Tensor) -> torch.Tensor:
        """The squares of whole parameters of `units`, of which this rank of the tensor axis may have only a part."""
        if self._axes.pipeline.size > 1:
            raise StateError(
                "gradients of other pipeline stages are not here, so a norm over model.parameters() would leave them "
                "out. Clip with optimizer.clip_grad_norm_(max_norm), which goes over all stages."
            )
        if self._axes.tensor.size == 1:
            return squares
        slots = itertools.chain.from_iterable(unit.layout.slots for unit in units)
        is_first = self._axes.tensor.rank == 0
        counts = [is_first if slot.cut is None else slot.cut.is_first for slot in slots]
        return self._axes.tensor.sum(squares * torch.tensor(counts, dtype=torch.bool, device=squares.device))


def _to_doubles(numbers: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """One tensor of them all, which waits for nothing on the device."""
    if any(isinstance(number, torch.Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def describe_missing(names: Sequence[str]) -> str:
    """The parameters without a gradient, in words that differ wherever the names do."""
    if not names:
        return ""
    shown, rest = ", ".join(names[:NUM_NAMED]), len(names) - NUM_NAMED
    mark = f"{zlib.crc32(' '.join(names).encode()):08x}"
    return f" (all but {shown}{f' and {rest} more, whose checksum is {mark}' if rest > 0 else ''})"
