"""The optimizer's pass over the units: which stretch is updated where, with its transfers on both sides.

    read    | u0 | u1 | u2 |                 states from disk or host into buffers
    update       | u0 | u1 | u2 |            the fused kernel
    write             | u0 | u1 | u2 |       states back to their tier, weights to theirs

Units are cut into pieces of bounded size, so buffers are bounded whatever the size of a unit. What is already in memory
is updated in place; only the rest passes through leased buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unbounded.native import kernels
from unbounded.native.kernels import UpdatePart
from unbounded.observe import trace
from unbounded.optim.rules import NativeRule, UpdateRule
from unbounded.tiers.array import Array, InFlight
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.pool import BufferPool, Lease
from unbounded.zero.gradients.scale_factor import ScaleFactor
from unbounded.zero.layout import Run, clip_range, find_runs
from unbounded.zero.unit import Unit, kernel_device


@dataclass(frozen=True)
class Job:
    """One contiguous run of a unit's owned part that is updated with the same numbers."""

    start: int  # inside the owned part
    stop: int
    numbers: Any
    slots: range


@dataclass(eq=False)
class Piece:
    """A stretch of one unit's owned part in the pass."""

    unit: Unit
    gradient: Array  # as it was at the step: the unit may drop or replace its own meanwhile
    factor: ScaleFactor  # what it is multiplied by
    start: int
    stop: int
    jobs: Sequence[Job]
    is_last: bool = False
    old_weights: Array | None = None  # updated with the states, if the unit has its new weights already
    part: UpdatePart = UpdatePart.WHOLE
    buffers: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    borrowed: list[str] = field(init=False, default_factory=list)
    leases: list[Lease] = field(init=False, default_factory=list)
    waits: list[InFlight] = field(init=False, default_factory=list)


def plan_jobs(unit: Unit, groups: Sequence[dict[str, Any]]) -> list[Job]:
    """The runs of `unit` to update in this step, their hyper-parameters read now."""
    steps = steps_after(unit)
    jobs, (low, high) = [], unit.owned
    for run in _runs(unit, steps):
        assert unit.rule is not None
        numbers = unit.rule.resolve(groups[run.group], int(steps[run.first]))
        part = clip_range(run.start, run.stop, low, high)
        start, stop = (part[0] - low, part[1] - low) if part else (0, 0)
        jobs.append(Job(start, stop, numbers, range(run.first, run.last)))
    return jobs


def steps_after(unit: Unit) -> np.ndarray:
    """How many updates each parameter has had once this step has counted."""
    return unit.steps + (np.frombuffer(unit.gradient.used, dtype=np.uint8) & unit.is_grouped)


def _runs(unit: Unit, steps: np.ndarray) -> list[Run]:
    """The runs of a unit to update: by group alone if all parameters are used and have stepped alike."""
    slots = unit.layout.slots
    if 0 not in unit.gradient.used and steps.min() == steps.max() and not any(unit.scalars):
        return unit.group_runs
    scalars = [tuple(sorted(held.items())) for held in unit.scalars]
    updated = np.frombuffer(unit.gradient.used, dtype=np.uint8) & unit.is_grouped
    keys = [(slots[i].group, int(steps[i]), scalars[i]) if updated[i] else None for i in range(len(slots))]
    return find_runs(unit.layout, keys)


def cut_pieces(unit: Unit, jobs: Sequence[Job], piece_numel: int) -> list[Piece]:
    """The pieces of a unit's owned part that any job touches."""
    numel = unit.owned[1] - unit.owned[0]
    pieces = []
    size = piece_numel if needs_buffers(unit) else numel
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        inside = [job for job in jobs if clip_range(job.start, job.stop, start, stop)]
        if inside:
            assert unit.gradient.store.array is not None
            pieces.append(Piece(unit, unit.gradient.store.array, unit.gradient.factor, start, stop, inside))
    if pieces:
        pieces[-1].is_last = True
    return pieces


Notify = Callable[[Unit], None]


class UpdatePass:
    """Carries pieces through read, update and write with `depth` of them in flight."""

    def __init__(self, rule: UpdateRule, pool: kernels.Pool | None, bounce: BufferPool, depth: int) -> None:
        self.rule, self.pool, self.bounce, self.depth = rule, pool, bounce, depth
        self._every = {spec.name: spec.every for spec in rule.specs}

    def run(self, pieces: Iterable[Piece], *, on_home: Notify, on_written: Notify) -> None:
        """Updates the pieces in order. Reports when each unit's new weights are in place, and when all its states are.

        Reads of the next unit and writes of the last continue meanwhile, so the disk never waits for a unit to be done.
        """
        stages = _PassStages(self, on_home, on_written)
        ItemPipeline(stages, num_ahead=self.depth, num_unfinished=self.depth - 1).run(pieces)

    def _arrays(self, piece: Piece) -> dict[str, tuple[Array, int, int]]:
        unit = piece.unit
        arrays = {"weight": (piece.old_weights or unit.weights, piece.start, piece.stop)}
        arrays["grad"] = (piece.gradient, piece.start, piece.stop)
        for name, array in unit.states.items():
            every = self._every[name]
            arrays[name] = (array, piece.start // every, -(-piece.stop // every))
        return arrays

    def _read(self, piece: Piece) -> None:
        """Uses what the kernel can address; starts bringing the rest into buffers."""
        piece.unit.make_way(self.pool)
        device = self._device(piece.unit)
        for name, (array, start, stop) in self._arrays(piece).items():
            if array.direct is not None and array.direct.device == device:
                piece.buffers[name] = array.direct[start:stop]
                continue
            buffer = piece.buffers[name] = self._buffer(piece, device, array.dtype, stop - start)
            piece.waits.append(array.fetch(buffer, start))
            if name != "grad":
                piece.borrowed.append(name)

    def _device(self, unit: Unit) -> torch.device:
        return kernel_device(unit)

    def _buffer(self, piece: Piece, device: torch.device, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if device.type == "cuda":
            return torch.empty(numel, dtype=dtype, device=device)
        lease = self.bounce.lease()
        piece.leases.append(lease)
        return lease.tensor(dtype, numel)

    def _wait(self, piece: Piece) -> None:
        for wait in piece.waits:
            wait.wait()
        piece.waits.clear()

    def _update(self, piece: Piece) -> None:
        self._wait(piece)
        lane = "host optimizer" if piece.buffers["weight"].device.type == "cpu" else "compute"
        with trace.device_span(lane, piece.unit.name):
            for job in piece.jobs:
                start, stop = max(job.start, piece.start), min(job.stop, piece.stop)
                scalars = self._apply(piece, job, start - piece.start, stop - piece.start)
                if scalars and stop == job.stop:
                    for slot in job.slots:
                        piece.unit.scalars[slot] = dict(scalars)

    def _apply(self, piece: Piece, job: Job, start: int, stop: int) -> dict[str, float]:
        states = {name: piece.buffers[name][start // every : -(-stop // every)] for name, every in self._every.items()}
        if piece.part is not UpdatePart.WHOLE:
            assert isinstance(self.rule, NativeRule)
            weight, grad = (piece.buffers[name][start:stop] for name in ("weight", "grad"))
            self.rule.apply_part(
                piece.part,
                job.numbers,
                weight=weight,
                grad=grad,
                states=states,
                factor=float(piece.factor),
                pool=self.pool,
            )
            return {}
        return self.rule.apply(
            job.numbers,
            piece.unit.scalars[job.slots[0]],
            weight=piece.buffers["weight"][start:stop],
            grad=piece.buffers["grad"][start:stop],
            states=states,
            grad_scale=piece.factor,
            pool=self.pool,
        )

    def _write(self, piece: Piece) -> None:
        arrays, delivery = self._arrays(piece), piece.unit.delivery
        if delivery is not None and "weight" in piece.borrowed and piece.old_weights is None:
            delivered = delivery.put(piece.buffers["weight"], piece.start)
            piece.waits += [delivered] if delivered is not None else []
        for name in piece.borrowed:
            array, start, _ = arrays[name]
            piece.waits.append(array.evict(piece.buffers[name], start))

    def _finish(self, piece: Piece) -> None:
        """Returns the buffers once nothing moves into or out of them, even if a transfer fails."""
        if piece.waits:
            try:
                piece.waits.pop().wait()
            finally:
                self._finish(piece)
            return
        for lease in piece.leases:
            lease.release()
        piece.leases.clear()
        piece.buffers.clear()


@dataclass(frozen=True)
class _PassStages:
    """What the pipeline does with a piece, and who is notified."""

    steps: UpdatePass
    on_home: Notify
    on_written: Notify

    def read(self, piece: Piece) -> None:
        self.steps._read(piece)

    def work(self, piece: Piece) -> None:
        self.steps._update(piece)
        self.steps._write(piece)
        if piece.is_last and piece.unit.weights.direct is not None:  # copied in order, ahead of what follows
            self.on_home(piece.unit)

    def finish(self, piece: Piece) -> None:
        self.steps._finish(piece)
        if piece.is_last:
            if piece.unit.weights.direct is None:
                self.on_home(piece.unit)
            if piece.part is not UpdatePart.WEIGHTS:
                self.on_written(piece.unit)

    def abandon(self, piece: Piece) -> None:
        self.steps._finish(piece)


def _arrays(unit: Unit) -> list[Array | None]:
    return [unit.weights, unit.gradient.store.array, *unit.states.values()]


def needs_buffers(unit: Unit) -> bool:
    """Whether any array of the unit has to be brought to where the kernel runs."""
    device = kernel_device(unit)
    return any(array is None or array.direct is None or array.direct.device != device for array in _arrays(unit))


def moved_sizes(unit: Unit) -> list[int]:
    """Bytes of an element of each array that an update on the host brings into a buffer."""
    arrays = [(unit.weights.tier, unit.weights.dtype), (unit.gradient.tier, unit.gradient.store.dtype)]
    arrays += [(array.tier, array.dtype) for array in unit.states.values()]
    near = ("host", "device") if unit.device.type == "cpu" else ("host",)
    return [dtype.itemsize for tier, dtype in arrays if tier not in near]


def touches_disk(unit: Unit) -> bool:
    """Whether any array of the unit has to be read from the disk."""
    return any(array is not None and array.tier == "disk" for array in _arrays(unit))
