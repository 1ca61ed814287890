"""Simulates a given way of training on a given machine: the time of a step, and its bytes on each tier. Pure.

The simulator does what it is told: one tier for each kind of state, one policy for all blocks. `search` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unbounded.planner.machine import MachineRates
from unbounded.planner.models.footprint import Footprint
from unbounded.planner.plan import TIERS
from unbounded.planner.step.loads import (
    Setup,
    activation_loads,
    base_loads,
    place_loads,
    unit_bytes,
)
from unbounded.planner.step.peaks import working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.planner.unit_bytes import UnitPlace

EVERYTHING_ON_DEVICE = UnitPlace("device", "device", "device")


@dataclass(frozen=True)
class Way:
    """How all units are placed and what all blocks keep."""

    place: UnitPlace = EVERYTHING_ON_DEVICE
    activations: str = "recompute"


def simulate(footprint: Footprint, machine: MachineRates, setup: Setup, way: Way = Way()) -> Prediction:
    """One step of `setup.tokens` x `setup.accumulate` on every data rank."""
    lanes = base_loads(footprint, machine, setup).seconds
    held: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}
    for part in footprint.parts:
        count = part.count / setup.pipeline
        unit = unit_bytes(part, footprint, setup)
        loads = place_loads(unit, way.place, machine, setup).seconds
        lanes = [total + count * seconds for total, seconds in zip(lanes, loads, strict=True)]
        for tier, kind, taken in (
            (way.place.weights, "weights", float(unit.weights)),
            (way.place.gradients, "gradients", unit.size("gradients", way.place.gradients)),
            (way.place.optimizer, "optimizer", unit.optimizer),
            (way.place.remainder, "optimizer", unit.remainder),
        ):
            held[tier][kind] = held[tier].get(kind, 0.0) + count * taken
        if part.is_block:
            policy, kept = activation_loads(part, way.activations, machine, setup)
            lanes = [total + count * seconds for total, seconds in zip(lanes, policy.seconds, strict=True)]
            for tier, num_bytes in kept.items():
                if num_bytes:
                    held[tier]["activations"] = held[tier].get("activations", 0.0) + count * num_bytes
    gathers = way.place.weights != "device" or (setup.stage == 3 and setup.data > 1)
    recomputes = way.activations != "keep"
    turn, end = working_bytes(footprint, setup, gathered=footprint.parts if gathers else (), recomputes=recomputes)
    held["device"]["working memory"] = max(turn, end)  # the papers' systems always hold gradients
    tokens = setup.tokens * setup.accumulate * setup.data
    flops = tokens * footprint.flops(setup.sequence)
    return Prediction(setup, machine, tuple(lanes), flops, held)


def fits(prediction: Prediction) -> Mapping[str, float]:
    """What each tier of a node is short by, 0 if it fits."""
    machine = prediction.machine
    inside = min(machine.devices, prediction.num_devices)
    need = {
        "device": prediction.tier_bytes("device"),
        "host": prediction.tier_bytes("host") * inside,
        "disk": prediction.tier_bytes("disk") * inside,
    }
    has = {"device": machine.device_bytes, "host": machine.host_bytes, "disk": machine.disk_bytes}
    return {tier: max(0.0, need[tier] - has[tier]) for tier in TIERS}
