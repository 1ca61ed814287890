"""The optimizer step over all units: what is updated, in which order, and who waits for it.

States on the GPU are updated on the compute stream at once. Everything else goes through lanes during the next
forward, each in the order in which that forward needs its units: the update lane runs the host's kernel over states
in host memory; at the same time the buffered lane brings those on disk through buffers, so that the disk does not wait
for the host; two stream lanes carry host states through the GPU and back, one going up while the other comes down.
Rules that see whole parameters have their own lane (`tensor_pass`). Each unit has a handle that whoever needs its new
weights waits for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unbounded.native import kernels
from unbounded.native.kernels import UpdatePart
from unbounded.optim.granularity import Granularity
from unbounded.optim.rules import UpdateRule
from unbounded.tiers.lane import Handle, Lane
from unbounded.tiers.pool import BufferPool
from unbounded.zero.engine import Engine
from unbounded.zero.gradients.gradient_value import GradientState
from unbounded.zero.gradients.scale_factor import ScaleFactor
from unbounded.zero.passes.capture import refuse_capture
from unbounded.zero.step.early.drafts import Basis, Draft, Drafts, basis_of
from unbounded.zero.step.home_exchange import HomeExchange
from unbounded.zero.step.tensor_pass import TensorPass, cut_wholes
from unbounded.zero.step.update_pass import (
    Job,
    Piece,
    UpdatePass,
    cut_pieces,
    moved_sizes,
    needs_buffers,
    plan_jobs,
    steps_after,
    touches_disk,
)
from unbounded.zero.unit import Unit, kernel_device

# Pieces through a GPU: how much larger, and how many at a time. Each takes time that Python needs to launch kernels.
STREAMED_TIMES, STREAMED_DEPTH = 2, 2


@dataclass(eq=False)
class UnitUpdate:
    """One unit's part of a step in a lane, and the handles that others wait for."""

    unit: Unit
    pieces: list[Piece]
    home: Handle  # done when the new weights are in their place
    written: Handle  # done when the new states are
    before: Handle | None  # `states_written` of the step before: states that were not written must not be read
    basis: Basis  # what it is updated from, but for the factor, which the device may still be computing
    has_parts: bool  # whether its moments may be updated later than its weights

    @property
    def factor(self) -> ScaleFactor:
        return self.pieces[0].factor

    def be_home(self, lane: Lane) -> None:
        """The new weights are in their place, if they were not there before."""
        if not self.home.launched():
            self.home.complete(event=lane.mark())

    def fail(self, error: BaseException) -> None:
        for handle in (self.home, self.written):
            if not handle.launched():
                handle.fail(error)


@dataclass(frozen=True)
class Lanes:
    """Where updates run: on host memory as it is, through buffers, through the GPU, or on whole parameters."""

    direct: Lane
    buffered: Lane
    streams: Sequence[Lane]
    whole: Lane

    @property
    def all(self) -> list[Lane]:
        """In the order in which they are started: the slowest first."""
        return [self.whole, self.buffered, *self.streams, self.direct]

    def lane_for(self, unit: Unit, num_streamed: int) -> Lane:
        """Everything that takes buffers is in one lane: two lanes waiting for each other's buffers would deadlock.

        So is everything for which ranks exchange whole parameters, because they match only by order.
        """
        if unit.needs_wholes:
            return self.whole
        if unit.streamed:
            return self.streams[num_streamed % len(self.streams)]
        return self.buffered if needs_buffers(unit) else self.direct


class Updates:
    """Runs the rule over units; one pass per step, or one per unit inside the backward (`at_once`)."""

    def __init__(
        self,
        engine: Engine,
        lanes: Lanes,
        num_threads: int,
        buffers: BufferPool,
        depth: int,
        drafts: Mapping[Unit, Draft],
        exchange: HomeExchange | None = None,
    ) -> None:
        self.engine, self.lanes = engine, lanes
        self._buffers, self._depth = buffers, depth
        self._piece_numel = buffers.buffer_bytes // 4
        # A disk is far slower than the kernel: a few threads keep up with it, while all of them work on host memory.
        few, many = kernels.Pool(max(1, num_threads // 4)), kernels.Pool(num_threads)
        # Without a GPU the host itself computes: it has nothing left for work that is done in two parts.
        self.drafts = Drafts(drafts, lanes.direct, many, splits=engine.device.type == "cuda")
        kinds = {"disk": (few, depth), "host": (many, depth), "device": (many, STREAMED_DEPTH)}
        rules = [unit.rule_if_trained for unit in engine.units]
        self._rules = list(dict.fromkeys(rule for rule in rules if rule is not None))
        self._passes: dict[tuple[str, UpdateRule], UpdatePass] = {
            (kind, rule): UpdatePass(rule, pool, buffers, in_flight)
            for kind, (pool, in_flight) in kinds.items()
            for rule in self._rules
        }
        for rule in self._rules:
            if rule.granularity is Granularity.TENSOR:
                self._passes["whole", rule] = TensorPass(rule, many, buffers, exchange, engine.device)

    def run(
        self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], outdate: Callable[[Unit], None] | None = None
    ) -> None:
        """Updates `units` in order; returns before the lanes have done their part.

        `outdate` is told of units whose gathered weights are now old, and must let running gathers end first. By
        default it is `Gathering.invalidate`.
        """
        refuse_capture("an update", self.engine.device)
        in_step = outdate is None  # and not inside a backward, which waits for all of an update
        outdate = outdate or self.engine.gathering.invalidate
        self.drafts.cancel()
        planned = [(unit, *self._plan(unit, groups)) for unit in units]  # a failure here has changed nothing
        queued: dict[Lane, list[UnitUpdate]] = {lane: [] for lane in self.lanes.all}
        try:
            on_stream = self._sort(planned, queued, outdate, in_step=in_step)
        except BaseException as error:
            for part in itertools.chain(*queued.values()):
                part.fail(error)
            raise
        ready = None
        if self.lanes.direct.stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        for lane, work in queued.items():
            if work:
                _fail_with(lane.submit(self._run_in, lane, work, ready), work)
        for unit, pieces in on_stream:  # only now: lanes that read a factor would wait for all of them
            self.engine.gathering.order_stream(unit)  # a running gather still reads what this writes
            self._run_now(unit, pieces)
            if not unit.is_whole or not unit.resident:
                outdate(unit)

    def buffer_bytes(self) -> int:
        """Host memory of the buffers that a step of all units takes: as many as are out at a time, as far as they are
        filled. (What is pinned is there to its end.)"""
        num_pieces = most_arrays = largest = 0
        for unit in self.engine.units:
            if unit.rule is None or unit.needs_wholes or kernel_device(unit).type != "cpu":
                continue
            sizes = moved_sizes(unit)
            if sizes:
                numel = unit.owned[1] - unit.owned[0]
                num_pieces += -(-numel // self._piece_numel)
                most_arrays = max(most_arrays, len(sizes))
                largest = max(largest, min(numel, self._piece_numel) * max(sizes))
        in_flight = min(num_pieces, 2 * self._depth - 1)  # see `ItemPipeline`
        filled = self._buffers.buffer_bytes if self._buffers.is_pinned else min(largest, self._buffers.buffer_bytes)
        return min(in_flight * most_arrays, self._buffers.count) * filled

    def _plan(self, unit: Unit, groups: Sequence[dict[str, Any]]) -> tuple[list[Job], list[Piece]]:
        gradient = unit.gradient
        gradient.order_stream()
        gradient.apply_changes()
        if gradient.state is GradientState.ZERO:
            gradient.apply_factor()
        if unit.needs_wholes:
            pieces = cut_wholes(unit, groups)
            return [job for piece in pieces for job in piece.jobs], pieces
        piece_numel = self._piece_numel * (STREAMED_TIMES if unit.streamed else 1)
        jobs = plan_jobs(unit, groups)
        return jobs, cut_pieces(unit, jobs, piece_numel)

    def _sort(
        self,
        planned: Sequence[tuple[Unit, list[Job], list[Piece]]],
        queued: dict[Lane, list[UnitUpdate]],
        outdate: Callable[[Unit], None],
        *,
        in_step: bool,
    ) -> list[tuple[Unit, list[Piece]]]:
        """Sorts what lanes update, with handles for whoever needs it; returns what the compute stream updates."""
        num_streamed, on_stream = 0, []
        for unit, jobs, pieces in planned:
            unit.steps = steps_after(unit)
            unit.note_change()
            if pieces and kernel_device(unit).type == "cuda" and not unit.streamed and not unit.needs_wholes:
                on_stream.append((unit, pieces))
            elif pieces:
                lane = self.lanes.lane_for(unit, num_streamed)
                num_streamed += unit.streamed
                basis = basis_of(unit, jobs, math.nan)
                has_parts = in_step and lane is self.lanes.direct and _has_parts(unit, jobs)
                work = UnitUpdate(unit, pieces, Handle(), Handle(), unit.states_written, basis, has_parts)
                queued[lane].append(work)
                self.engine.gathering.settle(unit)  # it waits for the update before this one, not for this one
                unit.weights_ready, unit.states_written = work.home, work.written
                unit.gradient.reading = work.written
                outdate(unit)
            elif not unit.is_whole:  # only peers use it, and it will be gathered again
                outdate(unit)
        return on_stream

    def _run_now(self, unit: Unit, pieces: list[Piece]) -> None:
        assert unit.rule is not None
        self._passes["device", unit.rule].run(pieces, on_home=_ignore, on_written=_ignore)

    def _run_in(self, lane: Lane, work: list[UnitUpdate], ready: torch.cuda.Event | None) -> None:
        """Runs in `lane`."""
        by_unit = {id(part.unit): part for part in work}
        is_disk_bound = all(touches_disk(part.unit) for part in work)
        kind = "device" if lane in self.lanes.streams else "disk" if is_disk_bound else "host"
        kind = "whole" if lane is self.lanes.whole else kind
        if ready is not None:
            _let_end(ready, by_host=kind in ("host", "disk"))
        try:
            _read_factors(work)
            begin = time.perf_counter()
            turns = [work]
            if lane is self.lanes.direct:
                self.drafts.begin_step(len(work), sum(part.before.waited_seconds for part in work if part.before))
                turns = [*self._in_turns(self._take_drafts(lane, work))]
            for turn, rule in [(some, rule) for some in turns for rule in dict.fromkeys(one.unit.rule for one in some)]:
                assert rule is not None
                self._passes[kind, rule].run(
                    _pieces(one for one in turn if one.unit.rule is rule),
                    on_home=lambda unit: by_unit[id(unit)].be_home(lane),
                    on_written=lambda unit: by_unit[id(unit)].written.complete(event=lane.mark()),
                )
            if lane is self.lanes.direct:
                self.drafts.pace.work(time.perf_counter() - begin)
        except BaseException as error:
            for part in work:
                part.fail(error)
            raise

    def _take_drafts(self, lane: Lane, work: list[UnitUpdate]) -> list[UnitUpdate]:
        """Exchanges old arrays for finished drafts; returns what is left: the states, where new weights are taken."""
        left: list[UnitUpdate] = []
        num_written = num_taken = 0
        for part in work:
            draft = self.drafts.of.get(part.unit)
            num_written += draft is not None and draft.is_written
            if part.before is not None:
                part.before.order_stream()
            if draft is None or not draft.take(replace(part.basis, factor=float(part.factor))):
                left.append(part)
                continue
            num_taken += 1
            part.be_home(lane)
            if draft.has_states:
                part.written.complete(event=lane.mark())
                continue
            for piece in part.pieces:
                piece.old_weights = draft.old_weights
            left.append(part)
        factors = {float(part.factor) for part in work}
        self.drafts.outlook.note(factors, num_taken=num_taken, num_refused=num_written - num_taken)
        return left

    def _in_turns(self, work: list[UnitUpdate]) -> tuple[list[UnitUpdate], list[UnitUpdate]]:
        """What the next forward waits for, in its order, and then what it does not.

        The latter are the states of units whose new weights were taken, and the moments of units that are updated in
        two parts. Of those the last unit comes first, because the next backward brings its gradient first. So the
        first units are updated in two parts: their moments have most time.
        """
        first: list[UnitUpdate] = []
        later: list[UnitUpdate] = []
        num_split = self.drafts.num_split()
        for one in work:
            if one.pieces[0].old_weights is not None:
                later.append(one)
            elif num_split > 0 and one.has_parts:
                num_split -= 1
                first.append(_part(one, UpdatePart.WEIGHTS))
                later.append(_part(one, UpdatePart.MOMENTS))
            else:
                first.append(one)
        return first, later[::-1]


def _has_parts(unit: Unit, jobs: Sequence[Job]) -> bool:
    assert unit.rule is not None
    return all(unit.rule.has_parts(job.numbers) for job in jobs)


def _part(work: UnitUpdate, part: UpdatePart) -> UnitUpdate:
    """One part of it, with the same handles."""
    return replace(work, pieces=[replace(piece, part=part) for piece in work.pieces])


def _fail_with(handle: Handle, work: Iterable[UnitUpdate]) -> None:
    """Fails the updates of a lane that has no thread to run them, so that nobody waits for them."""
    if handle.error is not None:
        for part in work:
            part.fail(handle.error)


def _let_end(ready: torch.cuda.Event, *, by_host: bool) -> None:
    """Lets what was queued before `ready` go first. Copies to the device may be among it, of a forward after the
    backward, and the host would write over what they still read."""
    if by_host:
        ready.synchronize()
    else:
        torch.cuda.current_stream().wait_event(ready)


def _read_factors(work: Iterable[UnitUpdate]) -> None:
    """Turns factors that the device has computed into numbers, waiting once for each: usually all units share one."""
    numbers: dict[int, float] = {}
    for piece in (piece for part in work for piece in part.pieces):
        if isinstance(piece.factor, torch.Tensor):
            if id(piece.factor) not in numbers:
                numbers[id(piece.factor)] = float(piece.factor)
            piece.factor = numbers[id(piece.factor)]


def _pieces(work: Iterable[UnitUpdate]) -> Iterator[Piece]:
    for part in work:
        if part.before is not None:
            part.before.order_stream()
        yield from part.pieces


def _ignore(unit: Unit) -> None:
    """Does nothing, because the compute stream orders what follows."""
