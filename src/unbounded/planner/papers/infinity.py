"""ZeRO-Infinity (Rajbhandari et al. 2021): memory, the largest models on DGX-2 nodes, and throughput.

`Setup` says how its runtime differs from ours: 20 bytes of states per parameter, an optimizer step that nothing hides,
gathers and reductions between nodes that the computation waits for. Rates are as the paper counts them, with the
recomputed forward: 8 FLOPs per parameter and token.
"""

from __future__ import annotations

from dataclasses import dataclass

from unbounded.planner.models.footprint import MEGATRON, StateBytes, footprint_of
from unbounded.planner.models.shapes import Shape, make_shape
from unbounded.planner.papers.table import MEMORY, THROUGHPUT, Row
from unbounded.planner.plan import TIERS
from unbounded.planner.presets import find_machine
from unbounded.planner.simulation import Prediction, Way, fits, simulate
from unbounded.planner.step.loads import Setup
from unbounded.planner.unit_bytes import UnitPlace

SEQUENCE, VOCABULARY = 1024, 50257
# fp16 weights and gradients, fp32 master and moments: 16 bytes that a step moves; fp32 gradients take 4 more of memory.
MOVED = StateBytes(weights=2, gradients=2, optimizer=12, remainder=0, summed=2)
STATES = StateBytes(weights=2, gradients=2, optimizer=16, remainder=0, summed=2)
TIB, GIB = 2**40, 2**30

# Figure 2a: layers, hidden, heads, TB of states, GB of working memory, GB of activation working memory (micro-batch 4)
MEMORY_TABLE = {
    "0.1T": (80, 10240, 128, 1.83, 1.95, 1.63),
    "0.5T": (100, 20480, 160, 9.16, 6.25, 2.50),
    "1T": (128, 25600, 256, 18.31, 9.77, 3.56),
    "10T": (195, 65536, 512, 182.81, 64.00, 8.00),
    "100T": (315, 163840, 1024, 1845.70, 400.00, 18.00),
}


def memory_rows() -> list[Row]:
    """Figure 2a. Its GB and TB are binary."""
    rows, title = [], "ZeRO-Infinity figure 2a: memory"
    for name, (layers, hidden, heads, states, working, activations) in MEMORY_TABLE.items():
        footprint = footprint_of(_shape(layers, hidden, heads), kernels=MEGATRON, states=STATES)
        block = next(part for part in footprint.parts if part.is_block)
        # The paper counts 12 x layers x hidden^2 parameters, so biases, norms and the embedding are left out here too.
        blocks = 12 * layers * hidden * hidden * STATES.total
        rows.append(Row(title, f"{name}: states", "TB", states, blocks / TIB, MEMORY))
        linear = block.largest * (STATES.weights + STATES.gradients)
        note = "the paper's figure is 1.25 times its own formula" if name == "0.1T" else ""
        rows.append(Row(title, f"{name}: working memory", "GB", working, linear / GIB, MEMORY, note))
        between = 4 * SEQUENCE * (16 * hidden + 2 * heads * SEQUENCE)
        rows.append(Row(title, f"{name}: activation working memory", "GB", activations, between / GIB, MEMORY))
    return rows


@dataclass(frozen=True)
class System:
    """One of the systems of table 2: what it partitions and where it keeps states."""

    name: str
    stage: int
    place: UnitPlace
    tensor: int = 1


def _place(weights: str, gradients: str, optimizer: str) -> UnitPlace:
    return UnitPlace(weights, gradients, optimizer)


# Figure 6a: the largest model on one DGX-2, in billions.
SYSTEMS = (
    (System("data parallel", 0, _place("device", "device", "device")), 1.4),
    (System("ZeRO-2", 2, _place("device", "device", "device")), 10),
    (System("ZeRO-Offload", 2, _place("device", "host", "host")), 13),
    (System("ZeRO-3", 3, _place("device", "device", "device")), 20),
    (System("3D parallelism", 1, _place("device", "device", "device"), tensor=16), 20),
    (System("Infinity, CPU", 3, _place("host", "host", "host")), 70),
    (System("Infinity, NVMe", 3, _place("disk", "disk", "disk")), 1000),
)
# Sizes to try, in billions: layers and hidden size. Those that the paper ran, and rungs of ours between and above them.
LADDER = {
    1.4: (40, 1536), 2.5: (48, 1920), 5: (40, 3072), 10: (50, 4096), 13: (64, 4096), 20: (98, 4096), 50: (62, 8192),
    70: (87, 8192), 100: (125, 8192), 500: (124, 18432), 1000: (128, 25600), 2000: (162, 32768), 4000: (207, 40960),
    8000: (175, 62464), 16000: (202, 81920), 32000: (246, 104448), 64000: (300, 133120),
}  # fmt: skip
NODES = ((1, 1), (8, 8), (16, 16), (32, 32))  # figure 1: nodes and trillions


def largest_rows() -> list[Row]:
    """The largest rung of the ladder that fits, and what the next one is short of."""
    title = "ZeRO-Infinity figure 6a: largest model on one DGX-2"
    rows = []
    for system, paper in SYSTEMS:
        largest = _largest(system, 1)
        rows.append(Row(title, system.name, "B", paper, largest, MEMORY, _next_rung(system, largest, 1)))
    title = "ZeRO-Infinity figure 1: largest model on N nodes"
    infinity = SYSTEMS[-1][0]
    for nodes, trillions in NODES:
        largest = _largest(infinity, nodes)
        note = _next_rung(infinity, largest, nodes)
        rows.append(Row(title, f"{nodes} nodes", "T", trillions, largest / 1000, MEMORY, note))
    return rows


def _next_rung(system: System, largest: float, nodes: int) -> str:
    above = min((size for size in LADDER if size > largest), default=None)
    if above is None:
        return ""
    tier, short = max(_short(system, above, nodes).items(), key=lambda item: item[1])
    return f"{above:,g}B lacks {short / 1e9:,.0f} GB of {tier} per {'GPU' if tier == 'device' else 'node'}"


def _largest(system: System, nodes: int) -> float:
    return max((size for size in LADDER if not any(_short(system, size, nodes).values())), default=0.0)


def _short(system: System, size: float, nodes: int) -> dict[str, float]:
    """What each tier is short by; layers wider than a device has room for are run in tiles."""
    layers, hidden = LADDER[size]
    footprint = footprint_of(_shape(layers, hidden, max(16, hidden // 128)), kernels=MEGATRON, states=STATES)
    machine = find_machine(f"dgx2:{nodes}")
    data = machine.num_devices // system.tensor
    setup = Setup(
        tokens=SEQUENCE,
        sequence=SEQUENCE,
        stage=system.stage,
        data=data,
        tensor=system.tensor,
        tile_bytes=GIB if system.place.weights == "disk" else 0,
    )
    policy = "host" if system.place.weights != "device" else "recompute"
    prediction = simulate(footprint, machine, setup, Way(system.place, policy))
    return {tier: fits(prediction)[tier] for tier in TIERS}


# Table 1: billions, nodes, layers, hidden, batch per GPU, model parallel, weights, optimizer, TFLOP/s (figures 5a, 5c)
RUNS = (
    (500, 32, 124, 18432, 7, 4, "device", "device", 46),
    (1000, 32, 128, 25600, 5, 4, "device", "device", 49),
    (5000, 32, 174, 49152, 3, 4, "disk", "disk", 44),
    (10000, 32, 200, 65536, 2, 4, "disk", "disk", 43),
    (20000, 32, 205, 90112, 1.25, 8, "disk", "disk", 34),
    (10, 1, 50, 4096, 8, 1, "device", "device", 45),
    (50, 1, 62, 8192, 26, 1, "host", "disk", 44),
    (100, 1, 125, 8192, 24, 1, "host", "disk", 41),
    (500, 1, 124, 18432, 8, 1, "disk", "disk", 33),
    (1000, 1, 128, 25600, 7, 1, "disk", "disk", 27),
)


def throughput_rows() -> list[Row]:
    rows = []
    for billions, nodes, layers, hidden, batch, tensor, weights, optimizer, paper in RUNS:
        title = f"ZeRO-Infinity figure {'5a: 512 V100' if nodes == 32 else '5c: one DGX-2'}"
        prediction = run(layers, hidden, nodes, batch=batch, tensor=tensor, weights=weights, optimizer=optimizer)
        what = f"{billions / 1000:g}T" if billions >= 500 else f"{billions}B"
        rows.append(Row(title, what, "TFLOP/s per GPU", paper, _counted(prediction, layers, hidden), THROUGHPUT))
    return rows


def scaling_rows() -> list[Row]:
    """Figure 5b: 1T from 4 to 32 nodes with a constant batch per GPU. A GPU does more on 32 nodes, because each node's
    disks and host memory hold less of the optimizer."""
    title = "ZeRO-Infinity figure 5b: weak scaling of 1T"
    few = _counted(run(128, 25600, 4, batch=5, tensor=4, weights="host", optimizer="disk"), 128, 25600)
    many = _counted(run(128, 25600, 32, batch=5, tensor=4, weights="device", optimizer="device"), 128, 25600)
    return [
        Row(title, "4 nodes", "TFLOP/s per GPU", 44, few, THROUGHPUT),
        Row(title, "32 nodes", "TFLOP/s per GPU", 49, many, THROUGHPUT),
        Row(title, "32 nodes over 4", "times", 25 / 2.8, 8 * many / few, THROUGHPUT, "super-linear above 8"),
    ]


def run(layers: int, hidden: int, nodes: int, *, batch: float, tensor: int, weights: str, optimizer: str) -> Prediction:
    """One of the paper's runs, step by step as its system does them."""
    machine = find_machine(f"dgx2:{nodes}")
    footprint = footprint_of(_shape(layers, hidden, hidden // 128), kernels=MEGATRON, states=MOVED)
    setup = Setup(
        tokens=int(batch * tensor * SEQUENCE),
        sequence=SEQUENCE,
        data=machine.num_devices // tensor,
        tensor=tensor,
        hides_updates=False,
        hides_collectives=False,
    )
    gradients = optimizer if optimizer == "device" else "host"
    policy = "recompute" if weights == "device" and optimizer == "device" else "host"
    return simulate(footprint, machine, setup, Way(UnitPlace(weights, gradients, optimizer), policy))


def _counted(prediction: Prediction, layers: int, hidden: int) -> float:
    """TFLOP/s per GPU as the paper counts: 8 x parameters x tokens."""
    flops = 8 * 12 * layers * hidden * hidden * prediction.tokens
    return flops / prediction.seconds / prediction.num_devices / 1e12


def _shape(layers: int, hidden: int, heads: int) -> Shape:
    return make_shape(layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, positions=SEQUENCE, tied=1)
