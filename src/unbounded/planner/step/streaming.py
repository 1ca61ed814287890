"""Which units with states on the host are updated by the GPU instead, their states streamed through PCIe and back.

The arithmetic, per parameter with `exact` AdamW states: the host's kernel reads and writes 26 bytes of host memory;
streaming moves 14 bytes up and 12 down (gradient, weight, remainder and moments up; all but the gradient back),
which are the same 26 bytes of host memory. So with enough cores to reach the memory's limit, streaming gains
nothing; with few cores, it uses what the cores leave. The split is a pure function of the machine, so two runs split
alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbounded.planner.machine import MachineRates

UPDATED, STREAMED = 26, 14  # bytes of host memory per parameter, and of the busier direction of the link


def stream_rate(machine: MachineRates) -> float:
    """What the devices of a node add to its host's kernel, in bytes of host memory per second, or 0."""
    if machine.is_cpu:
        return 0.0
    through_links = machine.up() * machine.devices / STREAMED * UPDATED
    stream = min(through_links, machine.host_bandwidth - machine.host_rate)
    return stream if stream / (stream + machine.host_rate) >= 0.1 else 0.0


def streamed_part(machine: MachineRates) -> float:
    """The part of the host's units to stream so that both finish together."""
    stream = stream_rate(machine)
    return stream / (stream + machine.host_rate)


def choose_streamed(candidates: Sequence[bool], part: float) -> list[bool]:
    """Spreads the part evenly over the candidates, so that both sides advance through the model together."""
    chosen, seen = [], 0
    for candidate in candidates:
        seen += candidate
        chosen.append(bool(candidate and int(seen * part) > int((seen - 1) * part)))
    return chosen


def carries_weights(*, states: str, weights: str) -> bool:
    """Whether an update must bring only the weights to the GPU, which a lane does during the forward."""
    return states == "device" and weights != "device"
