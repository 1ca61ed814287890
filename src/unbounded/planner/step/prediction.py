"""What a step is predicted to take: seconds by phase and lane, bytes by tier and kind, and what sets the pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unbounded.planner.machine import MachineRates
from unbounded.planner.step.loads import LANES, PHASES, Setup, repeats

NAMES = {
    "compute": "the computation",
    "launch": "launching operations one by one",
    "collectives": "collectives between ranks",
    "to device": "the link to the device",
    "to host": "the link to the host",
    "host memory": "the host's optimizer and memory",
    "disk read": "reading from disk",
    "disk write": "writing to disk",
    "disk": "the disk",
}
REMEDIES = {
    "compute": "more devices, compiled blocks, or room to keep what is recomputed",
    "launch": "compiled blocks, or more tokens per step",
    "collectives": "more tokens per step, or a faster network",
    "to device": "more tokens per step, weights on the device, or a faster link",
    "to host": "more tokens per step, or gradients on the device",
    "host memory": "more tokens per step, more of the optimizer on the device, or optimizer_format='compact'",
    "disk read": "more host memory, more tokens per step, or a faster disk",
    "disk write": "more host memory, more tokens per step, or a faster disk",
    "disk": "more host memory, more tokens per step, or more disks to stripe over",
}


@dataclass(frozen=True)
class Prediction:
    """One step of all ranks. `held` has bytes of one rank by tier and kind, `flops` those of all ranks."""

    setup: Setup
    machine: MachineRates
    lanes: tuple[float, ...]  # seconds of one pass of each phase, as `lanes.Loads` has them
    flops: float
    held: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.phases().values())

    @property
    def tokens(self) -> int:
        return self.setup.tokens * self.setup.accumulate * self.setup.data

    @property
    def num_devices(self) -> int:
        return self.setup.data * self.setup.model_ranks

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tflops(self) -> float:
        """Of a device."""
        return self.flops / self.seconds / self.num_devices / 1e12 if self.seconds else 0.0

    def lane(self, phase: str, lane: str) -> float:
        return self.lanes[PHASES.index(phase) * len(LANES) + LANES.index(lane)]

    def phases(self, without: Sequence[str] = ()) -> dict[str, float]:
        """Seconds of each phase with its repetitions; lanes in `without` cost nothing."""
        times = repeats(self.setup)
        return {
            phase: times[phase] * max(self.lane(phase, lane) for lane in LANES if lane not in without)
            for phase in PHASES
        }

    def busy(self) -> dict[str, float]:
        """Seconds that each lane works in a step, hidden or not."""
        times = repeats(self.setup)
        return {lane: sum(times[phase] * self.lane(phase, lane) for phase in PHASES) for lane in LANES}

    @property
    def bottleneck(self) -> str:
        """The lane that sets the pace for most of the step."""
        times = repeats(self.setup)
        paced = dict.fromkeys(LANES, 0.0)
        for phase in PHASES:
            slowest = max(LANES, key=lambda lane: self.lane(phase, lane))
            paced[slowest] += times[phase] * self.lane(phase, slowest)
        return max(LANES, key=lambda lane: paced[lane])

    def without_bottleneck(self) -> float:
        """Seconds of a step if the lane that sets the pace cost nothing."""
        lane = self.bottleneck
        return sum(self.phases(without=[name for name in LANES if name == lane or _same(name, lane)]).values())

    def tier_bytes(self, tier: str) -> float:
        """What one rank takes of a tier's budget."""
        return sum(self.held.get(tier, {}).values())

    @property
    def resident_bytes(self) -> float:
        """The resident set of one rank's process at its peak: what it holds on the host, and its libraries."""
        on_device = self.tier_bytes("device") if self.machine.is_cpu else 0.0
        return self.tier_bytes("host") + on_device + self.machine.process_bytes


def _same(name: str, lane: str) -> bool:
    """Whether two lanes are one piece of hardware."""
    return name.startswith("disk") and lane.startswith("disk")


def compare(predicted_seconds: float, measured_seconds: float) -> str:
    """Compares a run with its prediction, in one line: "predicted 2.31 s, measured 2.26 s"."""
    return f"predicted {_show(predicted_seconds)}, measured {_show(measured_seconds)}"


def _show(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
