"""The lanes of a step: how long computing, links, host memory and disks are busy in each of its phases.

    first forward   compute | units fetched | the update of the last step: device and host kernels, disk, links
    forward         compute | units fetched                                (again for each further micro-batch)
    backward        compute | units fetched | gradients leave | collectives (for each micro-batch)
    update          what no pass hides: collectives once per step, and on a CPU all updates

Where no gradient is stored, updates are work of the backward instead of the first forward.

A phase takes as long as its slowest lane, a step as long as its phases. Everything is a sum over units, blocks and
bytes, so `program` can choose among placements by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from unbounded.planner.machine import MachineRates
from unbounded.planner.models.footprint import Cost, Footprint, UnitFootprint
from unbounded.planner.plan import NOWHERE, TIERS
from unbounded.planner.step.streaming import stream_rate
from unbounded.planner.unit_bytes import UnitBytes, UnitPlace

PHASES = ("first forward", "forward", "backward", "update")
LANES = (
    "compute", "launch", "collectives", "to device", "to host", "host memory", "disk read", "disk write", "disk",
)  # fmt: skip
_SLOTS = {(phase, lane): i * len(LANES) + j for i, phase in enumerate(PHASES) for j, lane in enumerate(LANES)}
# Python's time for the hooks of one unit in one pass, in operations of the model. Assumed, not measured.
UNIT_LAUNCHES = 25


@dataclass(frozen=True)
class Setup:
    """How a step is run: the axes, the micro-batch of one rank, and what the engine hides.

    `hides_updates`: host and disk update in the next forward; `hides_collectives`: gathers and reductions run during
    the computation. Ours does both; the papers' systems do not.
    """

    tokens: int = 0  # of a micro-batch; 0: not known, so nothing hides the lanes
    sequence: int = 2048
    accumulate: int = 1
    stage: int = 3
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # model chunks per pipeline rank: interleaving
    prefetch_units: int = 2
    hides_updates: bool = True
    hides_collectives: bool = True
    tile_bytes: int = 0  # layers are gathered in tiles of so many bytes; 0: whole units
    state_format: str = "exact"
    logits_tile_bytes: int = 0  # logits that the loss makes at a time; 0: all of them

    @property
    def model_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def passes(self) -> float:
        """How many times a step takes as long as one micro-batch, including the pipeline's bubble."""
        return self.accumulate + (self.pipeline - 1) / self.chunks


class Loads:
    """Seconds by phase and lane, in the order that `Program` has them."""

    def __init__(self) -> None:
        self.seconds = [0.0] * (len(PHASES) * len(LANES))

    def add(self, phase: str, lane: str, seconds: float) -> None:
        self.seconds[_SLOTS[phase, lane]] += seconds

    def add_link(self, machine: MachineRates, phase: str, lane: str, num_bytes: float) -> None:
        """One rank's bytes to or from its device. They pass through host memory, which all devices of a node share."""
        self.add(phase, lane, num_bytes / (machine.up() if lane == "to device" else machine.down()))
        if not machine.is_cpu:
            self.add(phase, "host memory", num_bytes * machine.devices / machine.host_bandwidth)

    def add_disk(self, machine: MachineRates, phase: str, *, read: float = 0.0, write: float = 0.0) -> None:
        """One rank's bytes; all devices of a node share its disks."""
        if not read and not write:
            return
        for lane, num_bytes, rate in (
            ("disk read", read, machine.disk_read),
            ("disk write", write, machine.disk_write),
            ("disk", read + write, machine.disk_both),
        ):
            self.add(phase, lane, num_bytes * machine.devices / rate if rate else 0.0 if not num_bytes else 1e9)


def repeats(setup: Setup) -> dict[str, float]:
    return {"first forward": 1, "forward": setup.passes - 1, "backward": setup.passes, "update": 1}


def forward_seconds(cost: Cost, machine: MachineRates, setup: Setup) -> float:
    """One part on one rank of the tensor axis, for a micro-batch: products, memory-bound operations, all-reduces."""
    products = cost.flops(setup.sequence) / setup.tensor / machine.matmul_flops
    # Norms and residual additions are not split over the tensor axis; what is inside attention and ffn is.
    split = (1 + 1 / setup.tensor) / 2 * cost.moved + cost.attention_moved * setup.sequence / setup.tensor
    moved = split / machine.device_bandwidth
    return setup.tokens * (products + moved + _exchange(cost, machine, setup))


def backward_seconds(cost: Cost, machine: MachineRates, setup: Setup) -> float:
    """Twice the forward, minus the gradients of frozen weights."""
    frozen = 2 * (cost.products - cost.trained) / setup.tensor / machine.matmul_flops
    forward = forward_seconds(cost, machine, setup)
    exchange = setup.tokens * _exchange(cost, machine, setup)
    return 2 * (forward - exchange) + exchange - setup.tokens * frozen


def _exchange(cost: Cost, machine: MachineRates, setup: Setup) -> float:
    """Two all-reduces per block and pass; each sends twice its bytes through every rank's link."""
    if setup.tensor == 1:
        return 0.0
    rate = machine.peer_rate
    if setup.tensor > machine.devices:
        rate = min(rate, machine.network_bandwidth / machine.devices)
    return 2 * cost.exchanged * 2 * (setup.tensor - 1) / setup.tensor / rate


def collective_seconds(num_bytes: float, machine: MachineRates, setup: Setup) -> float:
    """One gather of `num_bytes` (or one reduce-scatter to parts of them) over the data axis."""
    if setup.data == 1:
        return 0.0
    inside = max(1, machine.devices // setup.tensor)  # ranks of a data axis in one node
    if setup.data <= inside or machine.nodes == 1:
        return num_bytes * (setup.data - 1) / setup.data / machine.peer_rate
    slices = max(1, machine.devices // min(inside, setup.data))  # parts of the model that a node's ranks gather
    return num_bytes * slices / machine.network_bandwidth


def unit_bytes(part: UnitFootprint, footprint: Footprint, setup: Setup) -> UnitBytes:
    """What one rank keeps of one unit."""
    states, shards = footprint.states, setup.data
    numel, trained = part.numel / setup.tensor, part.trained / setup.tensor
    owned = trained / (shards if setup.stage >= 1 else 1)
    grads = trained / (shards if setup.stage >= 2 else 1)
    kept = numel / (shards if setup.stage == 3 else 1)
    frozen = kept - trained / (shards if setup.stage == 3 else 1)
    return UnitBytes(
        part.name,
        weights=_round(kept * states.weights),
        gradients=_round(grads * states.gradients),
        optimizer=_round(owned * states.optimizer),
        remainder=_round(owned * states.remainder),
        summed_gradients=_round(grads * states.summed),
        owned=_round(owned * states.weights),
        packed=_round(frozen * states.packed + (kept - frozen) * states.weights) if states.packed and frozen else 0,
    )


def _round(value: float) -> int:
    return int(value + 0.5)


def place_loads(unit: UnitBytes, where: UnitPlace, machine: MachineRates, setup: Setup) -> Loads:
    """What one unit's states add to the lanes in this place."""
    loads = Loads()
    for phase in ("first forward", "forward", "backward"):
        if where.weights != "device":
            stored = unit.size("weights", where.weights)
            loads.add_link(machine, phase, "to device", stored)
            if where.weights == "disk":
                loads.add_disk(machine, phase, read=stored)
            if unit.is_packed:
                loads.add(phase, "compute", (stored + unit.weights) / machine.device_bandwidth)
    if where.gradients not in ("device", NOWHERE):
        loads.add_link(machine, "backward", "to host", unit.gradients)
        loads.add("backward", "host memory", _summed_seconds(unit, machine, setup))
        again = (setup.accumulate - 1) / setup.accumulate  # the backwards that add to earlier ones
        if where.gradients == "disk":
            stored = unit.size("gradients", "disk")
            loads.add_disk(machine, "backward", read=stored * again, write=stored)
    if unit.optimizer or unit.gradients:
        _add_update(loads, unit, where, machine, setup)
    return loads


def _summed_seconds(unit: UnitBytes, machine: MachineRates, setup: Setup) -> float:
    """The host's work on gradients in one backward, on average: the first only comes, the second makes sums of both,
    and the others change these. Without a GPU, the host also reads each that comes for the norm."""
    sums, times = unit.summed_gradients, setup.accumulate
    added = (times * unit.gradients + (2 * times - 3) * sums) / times if times > 1 else 0.0
    read = unit.gradients / times if machine.is_cpu else 0.0
    return machine.devices * (added / machine.addition_rate + read / machine.host_bandwidth)


def updated_from(unit: UnitBytes, setup: Setup) -> int:
    """The bytes of the gradient that an update reads."""
    return unit.summed_gradients if setup.accumulate > 1 else unit.gradients


def touched_bytes(unit: UnitBytes, setup: Setup) -> float:
    """What an update reads and writes: states and weights both ways, the gradient once."""
    return 2 * (unit.updated_weights + unit.optimizer + unit.remainder) + updated_from(unit, setup)


def _add_update(loads: Loads, unit: UnitBytes, where: UnitPlace, machine: MachineRates, setup: Setup) -> None:
    """The kernel runs where the optimizer states are (the host, for those on disk); the rest is moved there."""
    on_device = where.optimizer == "device"
    hidden = setup.hides_updates and not machine.is_cpu
    at_once = where.gradients == NOWHERE  # from the device, inside the backward
    phase = "update" if not hidden else "backward" if at_once else "first forward"
    weights = unit.updated_weights
    gradient = updated_from(unit, setup)
    if on_device and not machine.is_cpu:  # on the computing stream, before the next forward
        loads.add(phase, "compute", touched_bytes(unit, setup) / machine.device_bandwidth)
    else:
        rate = machine.update_rate(setup.state_format) + (stream_rate(machine) if where.optimizer == "host" else 0.0)
        loads.add(phase, "host memory", touched_bytes(unit, setup) * machine.devices / rate)
    for tier, num_bytes, comes_back in (
        (where.weights, weights, True),
        (where.remainder, unit.remainder, True),
        ("device" if at_once else where.gradients, gradient, False),
    ):
        if on_device and tier != "device":
            loads.add_link(machine, "update", "to device", num_bytes)
            loads.add_link(machine, "update", "to host", num_bytes * comes_back)
        if not on_device and tier == "device":
            loads.add_link(machine, phase, "to host", num_bytes)
            loads.add_link(machine, phase, "to device", num_bytes * comes_back)
        if tier == "disk":
            loads.add_disk(machine, "update" if on_device else phase, read=num_bytes, write=num_bytes * comes_back)
    if where.optimizer == "disk":
        loads.add_disk(machine, phase, read=unit.optimizer, write=unit.optimizer)


def base_loads(footprint: Footprint, machine: MachineRates, setup: Setup) -> Loads:
    """What no placement changes: the computation with every block kept, launches, collectives."""
    loads = Loads()
    for part in footprint.parts:
        count = part.count / setup.pipeline  # the embedding and the head are on one rank each: a mean
        forward = count * forward_seconds(part.cost, machine, setup)
        backward = count * backward_seconds(part.cost, machine, setup)
        launch_lane = "compute" if machine.is_cpu else "launch"  # a CPU launches nothing while it computes
        launches = count * (part.cost.num_kernels + UNIT_LAUNCHES * bool(part.numel)) * machine.kernel_seconds
        weights = footprint.states.weights * part.numel / setup.tensor
        gradients = footprint.states.gradients * part.trained / setup.tensor
        gather = count * collective_seconds(weights, machine, setup) if setup.stage == 3 else 0.0
        scatter = count * collective_seconds(gradients, machine, setup)
        lane = "collectives" if setup.hides_collectives else "compute"
        for phase in ("first forward", "forward"):
            loads.add(phase, "compute", forward)
            loads.add(phase, launch_lane, launches if setup.tokens else 0.0)
            loads.add(phase, lane, gather)
        loads.add("backward", "compute", backward)
        loads.add("backward", launch_lane, 2 * launches if setup.tokens else 0.0)
        loads.add("backward", lane, gather)
        if setup.stage >= 2:
            loads.add("backward", lane, scatter)
        elif setup.data > 1:  # once per step: an all-reduce, or a reduce-scatter and a gather of new weights
            loads.add("update", "collectives", 2 * scatter)
    if setup.pipeline > 1:
        _add_sends(loads, footprint, machine, setup)
    return loads


def _add_sends(loads: Loads, footprint: Footprint, machine: MachineRates, setup: Setup) -> None:
    """Activations from stage to stage, once per chunk and pass, split over the tensor axis (scatter and gather)."""
    rate = machine.network_bandwidth / machine.devices or machine.peer_rate
    seconds = setup.tokens * 2 * footprint.hidden / setup.tensor * setup.chunks / rate
    for phase in ("first forward", "forward", "backward"):
        loads.add(phase, "compute", seconds)


def activation_loads(
    part: UnitFootprint, policy: str, machine: MachineRates, setup: Setup
) -> tuple[Loads, dict[str, float]]:
    """What a policy adds to the lanes and takes of the tiers, for one block."""
    loads, cost = Loads(), part.cost
    held = dict.fromkeys(TIERS, 0.0)
    # A pipeline has as many micro-batches in flight as stages are left: the first rank the most.
    in_flight = min(setup.accumulate, setup.pipeline)
    kept = setup.tokens * cost.kept_bytes(setup.sequence) / setup.tensor * in_flight
    inputs = setup.tokens * cost.input * in_flight
    if policy == "keep":
        held["device"] = kept
        return loads, held
    loads.add("backward", "compute", forward_seconds(cost, machine, setup))
    loads.add("backward", "compute" if machine.is_cpu else "launch", cost.num_kernels * machine.kernel_seconds)
    if policy == "recompute":
        held["device"] = inputs
        return loads, held
    held["host"] = inputs
    for phase, lane in (("first forward", "to host"), ("forward", "to host"), ("backward", "to device")):
        loads.add_link(machine, phase, lane, setup.tokens * cost.input)
    return loads, held
