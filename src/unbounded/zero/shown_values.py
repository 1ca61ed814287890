"""Inside `full_params`: every parameter shows its whole value, to read and to write."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from unbounded.held_interrupts import HeldBack
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import join_cut
from unbounded.zero.engine import Engine
from unbounded.zero.parameters.parameter import set_data
from unbounded.zero.parameters.writes import line_sums
from unbounded.zero.unit import Unit


class _Shown(NamedTuple):
    """What the parameters of a unit were when they were shown."""

    owned: torch.Tensor  # a copy of this rank's part
    sums: torch.Tensor  # by which a write to any part is found, on every rank without the others


@contextmanager
def shown_values(engine: Engine) -> Iterator[None]:
    """All ranks of the axis must call this. Every parameter holds its full value; writes are kept. It may be nested.

    Each rank keeps its part of what it wrote, so at the end all ranks compare that.
    """
    before: dict[Unit, _Shown] | None = None
    written: dict[Unit, torch.Tensor] = {}
    try:
        with HeldBack(), engine.turn():
            engine.refuse_pending("unbounded.full_params()")
            before = None if engine.is_shown else _show(engine)
        yield
    finally:
        if before is not None:
            with HeldBack(), engine.turn():
                written = _hide(engine, before)
    if before is not None:
        engine.raise_failures()
        _compare(engine, written)


def _show(engine: Engine) -> dict[Unit, _Shown]:
    """Gathers all units and shows their values; returns what these were."""
    engine.settle()
    engine.copy_phases.confirm("unbounded.full_params()")
    with engine.phases.during("unbounded.full_params()"):
        for unit in engine.units:
            engine.gathering.request(unit)
    for unit in engine.units:
        engine.gathering.gather([unit])
        with engine.failures.noting():
            if unit.states_written is not None:
                unit.states_written.wait()
    engine.raise_failures()
    before: dict[Unit, _Shown] = {}
    engine.set_shown(True)
    try:
        for unit in engine.units:
            _open(unit, engine.axes.tensor, before)
    except BaseException:
        _hide(engine, before)
        raise
    return before


def _hide(engine: Engine, before: dict[Unit, _Shown]) -> dict[Unit, torch.Tensor]:
    """Keeps what was written to the shown values, and releases them; returns the sums of the units written to."""
    engine.set_shown(False)
    written: dict[Unit, torch.Tensor] = {}
    for unit, values in before.items():
        with engine.failures.noting():
            sums = _close(engine, unit, values)
            if sums is not None:
                written[unit] = sums
    if engine.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    engine.settle()
    return written


def _compare(engine: Engine, written: Mapping[Unit, torch.Tensor]) -> None:
    """All ranks of the axis must call this. Raises on all of them if they have not written the same values."""
    text = "the values that unbounded.full_params() keeps"
    marks = {unit: zlib.crc32(sums.cpu().numpy().data) for unit, sums in written.items()}
    shown = (f"written with checksum {marks[unit]:08x}" if unit in marks else "not written" for unit in engine.units)
    detail = "; ".join(f"unit {unit.name!r} {how}" for unit, how in zip(engine.units, shown, strict=True))
    engine.copy_phases.confirm(text, detail, ["context"])
    engine.phases.confirm(text, detail)


def _open(unit: Unit, tensor: Axis, before: dict[Unit, _Shown]) -> None:
    """Shows a gathered unit's whole values in its parameters; `before` gets a copy of the owned ones."""
    if unit.resident:
        unit.make_way()
    # First, so that nothing is shown if there is no memory for it.
    shown = _Shown(unit.owned_part().clone(), line_sums(unit.buffer))
    unit.views.show()
    before[unit] = shown
    views = unit.slot_views(unit.buffer)
    for parameter, slot, view in zip(unit.views.parameters, unit.layout.slots, views, strict=True):
        if slot.cut is not None:
            set_data(parameter, join_cut(slot.cut, view, tensor))


def _close(engine: Engine, unit: Unit, before: _Shown) -> torch.Tensor | None:
    """Keeps this rank's part of a unit; returns the sums of its new values if it was written to."""
    with torch.no_grad():
        unit.views.hide()
        unit.gradient.end_lending()
        engine.writes.store(unit, unit.owned_part(), before.owned)
        sums = line_sums(unit.buffer)
        is_written = not torch.equal(before.sums, sums)
    unit.views.place_data()
    if is_written:  # otherwise graphs from before are still good
        unit.note_change()
    unit.views.take_over_training()
    return sums if is_written else None
