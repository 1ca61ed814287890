"""Whole values of parameters for an export, whichever axes cut them: unit by unit, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from unbounded.ranks.cut import join_cut
from unbounded.zero.engine import Engine
from unbounded.zero.unit import Unit, WeightState


def unit_values(engine: Engine, unit: Unit) -> list[torch.Tensor]:
    """All ranks of a stage must call this. One whole host tensor per parameter; the unit is released afterwards."""
    was_gathered = unit.state is WeightState.GATHERED
    engine.gathering.gather([unit])
    if engine.is_shown:
        unit.views.take_shown()
    values = []
    for view, slot in zip(unit.slot_views(unit.buffer), unit.layout.slots, strict=True):
        value = view.detach()
        whole = value if slot.cut is None else join_cut(slot.cut, value, engine.axes.tensor)
        values.append(whole.to("cpu", copy=True))
    if not was_gathered:
        engine.gathering.release(unit)
    return values


def stream_values(engine: Engine, units: Sequence[Unit]) -> Iterator[list[tuple[str, int, torch.Tensor]]]:
    """All ranks must call this. The whole parameters of `units`, with those of the other stages' units.

    Each is a name, the element of the parameter that it begins with (not 0 for later tiles), and its value.
    """
    pipeline = engine.axes.pipeline
    for number in range(max(pipeline.objects(len(units)))):
        own: list[tuple[str, int, torch.Tensor]] = []
        if number < len(units):
            slots, values = units[number].layout.slots, unit_values(engine, units[number])
            own = [(slot.name, slot.first, value) for slot, value in zip(slots, values, strict=True)]
        yield [entry for held in pipeline.objects(own) for entry in held]
