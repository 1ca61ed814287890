"""Keeps values that users write to weights: brings them to the unit's tier and to whatever completes its weights.

Between passes, version counters show a write (`parameter`). Inside a forward modules hold plain tensors: version
counters show operations in place, but not those on `weight.data`, nor a new `.data`. So the first forwards of a unit
with gradients, and its first without, are checked against a fingerprint of its bytes, and a unit that was once written
to in that way is checked in every such forward from then on. Later the units take turns, one every few training
forwards. A write that begins then is found late and is an error, since earlier ones were lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unbounded.errors import StateError
from unbounded.native.bulk import convert, new_tensor
from unbounded.optim import formats
from unbounded.tiers.array import PAGE
from unbounded.zero.layout import round_up
from unbounded.zero.parameters.followed_view import shares
from unbounded.zero.unit import Unit

CHECKED_FORWARDS, ALWAYS = 2, 1 << 30
_LINE_WORDS = 256
TURN_FORWARDS = 8  # between the checks of two units, after the first forwards


class Writes:
    """Watches forwards for writes, and keeps what was written."""

    def __init__(self) -> None:
        self._checks_left: dict[bool, dict[Unit, int]] = {True: {}, False: {}}  # of forwards with gradients and without
        self._before: dict[Unit, torch.Tensor] = {}
        self._forwards: dict[Unit, int] = {}  # of each unit, with gradients, so far; it starts at the unit's turn
        self._late: set[Unit] = set()  # checked in its turn

    def is_new(self, unit: Unit) -> bool:
        """Whether the next forward of `unit` is checked apart from its turns, which may take a copy of it."""
        return self._checks().get(unit, CHECKED_FORWARDS) > 0

    def _checks(self) -> dict[Unit, int]:
        return self._checks_left[torch.is_grad_enabled()]

    def watch(self, unit: Unit) -> None:
        """A forward of `unit` begins."""
        left = self._checks().setdefault(unit, CHECKED_FORWARDS)
        self._late.discard(unit)
        if left and unit.resident:
            unit.make_way()  # for what is written in place
        if left or (torch.is_grad_enabled() and self._has_its_turn(unit)):
            is_copied = unit.resident and unit.has_master and unit not in self._late  # what is found late is an error
            self._before[unit] = unit.owned_part().clone() if is_copied else _fingerprint(unit.buffer)
        else:
            self._before.pop(unit, None)

    def _has_its_turn(self, unit: Unit) -> bool:
        count = self._forwards[unit] = self._forwards.setdefault(unit, TURN_FORWARDS * len(self._forwards)) + 1
        if count % (TURN_FORWARDS * len(self._checks())):
            return False
        self._late.add(unit)
        return True

    def find(self, unit: Unit) -> list[int]:
        """The parameters that the finished forward may have written to; new data is already in the buffer."""
        before, checks = self._before.get(unit), self._checks()
        rebound = unit.views.take_rebound() if before is not None else []
        written = unit.views.end_forward()
        if not (rebound or written or self._differs(unit, before)):
            if self._before.pop(unit, None) is not None and checks.get(unit, 0) <= CHECKED_FORWARDS:
                checks[unit] = max(0, checks.get(unit, 0) - 1)
            return []
        checks[unit] = ALWAYS
        if written:  # which is always seen
            self._late.discard(unit)
        return [*rebound, *written] or list(range(len(unit.layout.slots)))

    def _differs(self, unit: Unit, before: torch.Tensor | None) -> bool:
        if before is None:
            return False
        now = unit.owned_part() if before.numel() > 1 else _fingerprint(unit.buffer)
        return not torch.equal(_bits(before), _bits(now))

    def keep_from_forward(self, unit: Unit, slots: list[int]) -> None:
        """Keeps what a forward has written to the gathered buffer of `unit`."""
        now, before = unit.owned_part(), self._before.pop(unit, None)
        if unit.engine.is_shown:
            _refuse_changed_parts(unit, slots)
            return  # full_params keeps what the buffer has at its end
        if not unit.is_whole and before is not None and before.numel() == 1:
            is_changed = not torch.equal(before, _fingerprint(unit.buffer))  # in peers' parts too
        else:
            if before is None or before.numel() != now.numel():
                spans = [(slot.start, slot.stop) for slot in map(unit.layout.slots.__getitem__, slots)]
                before = _weights_before(unit, spans, now) if unit.resident else fetch_owned(unit)
            is_changed = unit.resident or not torch.equal(_bits(before), _bits(now))
        if not is_changed:
            return
        if unit.resident:
            unit.spoil_save(f"a forward has written to the weights of unit {unit.name!r}")
        if not unit.is_whole:
            raise StateError(
                f"the forward has changed the parameter {unit.layout.slots[slots[0]].name!r} in place, which cannot be "
                f"kept: it is partitioned over ranks and gathered again for every pass. Change it inside `with "
                "unbounded.full_params(model):`, between steps or in a forward there, in the same way on every rank."
            )
        self.store(unit, now, before)
        if unit in self._late and (not unit.resident or unit.has_master):
            raise StateError(
                f"the forward writes to the unit {unit.name!r} through `.data`, which began only after its first "
                f"forwards: what was written until now is lost. Write in place under torch.no_grad() (weight.mul_(...) "
                "instead of weight.data.mul_(...)), which is always seen."
            )

    def keep(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """Keeps a new value of one parameter outside a forward: this rank's part goes to its tier."""
        if unit.weights_ready is not None:
            unit.weights_ready.wait()
        unit.make_way()
        slot, (low, high) = unit.layout.slots[index], unit.owned
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            # On disk a stretch begins and ends on a page.
            first, last = (start - low) // PAGE * PAGE, min(round_up(stop - low, PAGE), high - low)
            before = fetch_owned(unit, first, last)
            now, span = before.clone(), (start - low - first, stop - low - first)
            now[slice(*span)].copy_(value.detach().reshape(-1)[start - slot.start : stop - slot.start])
            if unit.resident and shares(value, unit.buffer):  # it was written to where it is
                before = _weights_before(unit, [span], now, first)
            elif unit.resident:
                unit.owned_part()[first:last].copy_(now)
            self.store(unit, now, before, first)
        unit.note_change()

    def store(self, unit: Unit, now: torch.Tensor, before: torch.Tensor, start: int = 0) -> None:
        """Brings the changes of a stretch to the unit's owned weights and whatever completes them."""
        changed = (_bits(now) != _bits(before)).view(now.numel(), -1).any(dim=1)
        if not bool(changed.any()):
            return
        if unit.states_written is not None:
            unit.states_written.wait()  # an update may still be changing what completes the weights
        unit.make_way()
        unit.num_writes += 1
        try:
            self._store(unit, now, changed, start)
        finally:
            unit.num_writes += 1

    def _store(self, unit: Unit, now: torch.Tensor, changed: torch.Tensor, start: int) -> None:
        if not unit.resident:
            unit.weights.evict(now, start).wait()
        if unit.rule is None:
            return
        fresh = formats.encode_weight(now, unit.dtype, unit.rule)
        for name in formats.MASTER_STATES:
            if name in unit.states:
                array = unit.states[name]
                held = torch.empty(now.numel(), dtype=array.dtype, device="cpu")
                array.fetch(held, start).wait()
                held = torch.where(changed.cpu(), fresh[name].cpu(), held)
                array.evict(held, start).wait()


def _refuse_changed_parts(unit: Unit, slots: Sequence[int]) -> None:
    """Raises if the buffer has other values than a shown parameter that the tensor axis cuts, which is kept instead."""
    parts = unit.slot_views(unit.buffer)
    for index in slots:
        cut, shown = unit.layout.slots[index].cut, unit.views.parameters[index].detach()
        if cut is not None and not torch.equal(_bits(cut.take(shown)), _bits(parts[index])):
            raise StateError(
                f"a forward inside full_params has changed the parameter {unit.layout.slots[index].name!r}, of which "
                "this rank computes with a part and does not know what others have changed. Change it inside "
                "full_params between forwards, where it is whole."
            )


def fetch_owned(unit: Unit, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """A copy of a stretch of this rank's part of the weights, as their tier has it."""
    stop = unit.owned[1] - unit.owned[0] if stop is None else stop
    if unit.resident:
        return convert(unit.owned_part()[start:stop], unit.dtype, copy=True)
    held = new_tensor(stop - start, unit.dtype, unit.device)
    unit.weights.fetch(held, start).wait()
    return held


def _weights_before(unit: Unit, spans: Sequence[tuple[int, int]], now: torch.Tensor, start: int = 0) -> torch.Tensor:
    """What a resident unit had in place of `now`, from `start` of its part on, before a write to `spans` of it.

    A master that has it all is rounded again. Where the weights are its upper half, any of the spans may be new.
    """
    if "master" in unit.states:
        if unit.states_written is not None:
            unit.states_written.wait()
        master = torch.empty(now.numel(), dtype=unit.states["master"].dtype, device="cpu")
        unit.states["master"].fetch(master, start).wait()
        return master.to(now.dtype).to(now.device)
    before = now.clone()
    for span in spans:
        _bits(before)[slice(*span)].bitwise_not_()
    return before


def _fingerprint(buffer: torch.Tensor) -> torch.Tensor:
    """A number that almost surely differs for other contents."""
    data = buffer.view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)  # summed as they are; narrower ones would be copied to 64 bits first
    return (words.sum() + data[whole:].sum()).reshape(1)


def line_sums(buffer: torch.Tensor) -> torch.Tensor:
    """The sums of rows and columns of its words: almost surely others for other contents, or in another order."""
    data = buffer.view(torch.uint8)
    whole = data.numel() // (8 * _LINE_WORDS) * (8 * _LINE_WORDS)
    words = data[:whole].view(torch.int64).view(-1, _LINE_WORDS)
    return torch.cat([words.sum(0), words.sum(1), data[whole:].to(torch.int64)])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor`, so that a NaN equals itself; complex numbers of 16 bytes have two."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64))
