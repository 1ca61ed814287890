"""Updates that see whole parameters: brought from their tier, joined over the ranks, updated on the compute device.

    read       | p0 | p1 | p2 |                a few parameters at a time, from their tiers to the device
    exchange        | p0 | p1 |                this rank's stretches to the parameters' homes
    update             | p0 | p1 |             the rule, on one whole parameter after another
    exchange              | p0 | p1 |          back
    write                    | p0 | p1 |       to their tiers

On a GPU, pieces are read, updated and written on three streams, so that the link carries them both ways beside the
updates; the stream that writes is the lane's own. One rank has everything whole and exchanges nothing. Ranks match only
by the order of pieces, so one that cannot read its part goes on exchanging zeros, and raises when it is done: its peers
hear of it where all ranks meet next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unbounded.native import kernels
from unbounded.native.bulk import new_tensor
from unbounded.observe import trace
from unbounded.optim.rules import UpdateRule, Whole
from unbounded.tiers.array import DeviceCopy
from unbounded.tiers.pool import BufferPool
from unbounded.zero.layout import clip_range
from unbounded.zero.step.home_exchange import HomeExchange
from unbounded.zero.step.update_pass import Job, Notify, Piece, UpdatePass, steps_after
from unbounded.zero.unit import Unit

# Pieces read ahead of the one in work: each may be as large as the largest parameter.
DEPTH = 2


def cut_wholes(unit: Unit, groups: Sequence[dict[str, Any]]) -> list[Piece]:
    """Pieces of neighbouring parameters that have a gradient, each about as large as every rank's largest one.

    All ranks have the same pieces, even if nothing of a piece is theirs.
    """
    layout, steps, (low, high) = unit.layout, steps_after(unit), unit.owned
    assert unit.rule is not None
    assert unit.gradient.store.array is not None
    most = max(slot.numel for slot in layout.slots) * (1 if unit.is_whole else layout.num_shards)
    pieces: list[Piece] = []
    last, total = -1, 0
    for index, slot in enumerate(layout.slots):
        if not (unit.gradient.used[index] and unit.is_grouped[index]):
            continue
        numbers = unit.rule.resolve(groups[slot.group], int(steps[index]))
        start, stop = clip_range(*layout.slot_span(index), low, high) or (low, low)
        job = Job(start - low, stop - low, numbers, range(index, index + 1))
        total += slot.numel
        if pieces and last == index - 1 and total <= most:
            piece = pieces[-1]
            piece.jobs = [*piece.jobs, job]
            if start < stop:
                piece.start, piece.stop = (job.start if piece.start == piece.stop else piece.start), job.stop
        else:
            total = slot.numel
            pieces.append(Piece(unit, unit.gradient.store.array, unit.gradient.factor, job.start, job.stop, [job]))
        last = index
    if pieces:
        pieces[-1].is_last = True
    return pieces


class TensorPass(UpdatePass):
    """Carries pieces of whole parameters through. `exchange` is None if every unit is whole on its rank."""

    def __init__(
        self,
        rule: UpdateRule,
        pool: kernels.Pool | None,
        bounce: BufferPool,
        exchange: HomeExchange | None,
        device: torch.device,
    ) -> None:
        super().__init__(rule, pool, bounce, DEPTH)
        self._exchange = exchange
        self._error: Exception | None = None
        has_streams = device.type == "cuda"
        self._reading = torch.cuda.Stream(device) if has_streams else None
        self._updating = torch.cuda.Stream(device) if has_streams else None

    def run(self, pieces: Iterable[Piece], *, on_home: Notify, on_written: Notify) -> None:
        self._error = None
        if self._reading is not None:
            self._reading.wait_stream(torch.cuda.current_stream())
        pieces = self._next_pieces(pieces)
        super().run(pieces, on_home=self._unless_failed(on_home), on_written=self._unless_failed(on_written))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _next_pieces(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces in order. What must have happened before a piece is read, the stream that reads it waits for."""
        source = iter(pieces)
        while True:
            with torch.cuda.stream(self._reading):
                piece = next(source, None)
            if piece is None:
                return
            yield piece

    def _unless_failed(self, notify: Notify) -> Notify:
        """After an error nothing is announced; whoever waits for the update gets the error."""
        return lambda unit: notify(unit) if self._error is None else None

    def _device(self, unit: Unit) -> torch.device:
        return unit.device

    def _read(self, piece: Piece) -> None:
        if self._error is not None:
            return
        with torch.cuda.stream(self._reading):
            try:
                piece.unit.make_way(self.pool)  # factors are updated even if nothing else belongs to this rank
                if piece.start < piece.stop:
                    super()._read(piece)
                self._mark(piece)
            except Exception as error:
                self._note(error)

    def _buffer(self, piece: Piece, device: torch.device, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return new_tensor(numel, dtype, device)

    def _update(self, piece: Piece) -> None:
        lane = "compute" if self._updating is not None else "host optimizer"
        with torch.cuda.stream(self._updating):
            if self._error is None:
                try:
                    self._order(piece)
                except Exception as error:
                    self._note(error)
            with trace.device_span(lane, piece.unit.name):
                if self._exchange is None or piece.unit.is_whole:
                    self._update_here(piece)
                else:
                    self._update_apart(piece, self._exchange)
            self._mark(piece)

    def _order(self, piece: Piece) -> None:
        """Makes the current stream wait for what has been done to the piece so far."""
        for wait in piece.waits:
            wait.order_stream()

    def _mark(self, piece: Piece) -> None:
        """What is done to the piece next, and the return of its buffers, wait for the current stream."""
        if self._updating is not None:
            piece.waits.append(DeviceCopy(torch.cuda.current_stream().record_event()))

    def _update_here(self, piece: Piece) -> None:
        if self._error is not None:
            return
        low = piece.unit.owned[0] + piece.start
        for job in piece.jobs:
            slot = piece.unit.layout.slots[job.slots[0]]
            arrays = {name: buffer[slot.start - low : slot.stop - low] for name, buffer in piece.buffers.items()}
            self._apply_whole(piece, job, arrays)

    def _update_apart(self, piece: Piece, exchange: HomeExchange) -> None:
        unit, first = piece.unit, piece.unit.owned[0] + piece.start
        slots = [job.slots[0] for job in piece.jobs]
        buffers = piece.buffers if piece.buffers and self._error is None else self._stand_ins(piece)
        wholes = exchange.bring(unit, slots, buffers, first)
        for job in piece.jobs if self._error is None else ():
            if job.slots[0] in wholes:
                try:
                    self._apply_whole(piece, job, wholes[job.slots[0]])
                except Exception as error:
                    self._note(error)
        changed = {name: buffer for name, buffer in buffers.items() if name != "grad"}
        exchange.give_back(unit, slots, wholes, changed, first)

    def _stand_ins(self, piece: Piece) -> dict[str, torch.Tensor]:
        """What a rank exchanges if it has nothing of a piece, or could not read it."""
        return {
            name: new_tensor(piece.stop - piece.start, array.dtype, piece.unit.device).zero_()
            for name, (array, _, _) in self._arrays(piece).items()
        }

    def _apply_whole(self, piece: Piece, job: Job, arrays: Mapping[str, torch.Tensor]) -> None:
        unit, index = piece.unit, job.slots[0]
        factors = unit.factors.of(index, unit.device)
        scalars = self.rule.apply(
            job.numbers,
            unit.scalars[index],
            weight=arrays["weight"],
            grad=arrays["grad"],
            states={name: array for name, array in arrays.items() if name not in ("weight", "grad")},
            grad_scale=piece.factor,
            pool=self.pool,
            whole=Whole(unit.layout.slots[index].shape, factors),
        )
        unit.factors.put(index, factors)
        unit.scalars[index] = dict(scalars)

    def _write(self, piece: Piece) -> None:
        if self._error is None and piece.start < piece.stop:
            try:
                self._order(piece)
                super()._write(piece)
            except Exception as error:
                self._note(error)

    def _finish(self, piece: Piece) -> None:
        try:
            super()._finish(piece)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Remembers the first error; without peers, it is raised at once."""
        if self._exchange is None:
            raise error
        self._error = self._error or error
