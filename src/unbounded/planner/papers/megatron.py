"""Megatron-LM (Narayanan et al. 2021): table 1, end-to-end rates up to a trillion parameters, and its pipeline bubbles.

Micro-batches and model chunks are those of the paper's own scripts (examples/sc21/run_table_1.sh of Megatron-LM).
Rates are as the paper counts them, with the recomputed forward.
"""

from __future__ import annotations

from dataclasses import replace

from unbounded.planner.models.footprint import MEGATRON, StateBytes, footprint_of
from unbounded.planner.models.shapes import make_shape
from unbounded.planner.papers.table import EXACT, THROUGHPUT, Row
from unbounded.planner.presets import find_machine
from unbounded.planner.simulation import Way, simulate
from unbounded.planner.step.loads import Setup

STATES = StateBytes(weights=2, gradients=4, optimizer=12, remainder=0, summed=4)
SEQUENCE, VOCABULARY = 2048, 51200
# billions, heads, hidden, layers, tensor, pipeline, GPUs, batch, micro-batch, layers per chunk (0: all), TFLOP/s
TABLE = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 0, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 0, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 0, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 0, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 0, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 5, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 5, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 3, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 1, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 0, 163),
)
# The lines of figure 6: GPUs and batch over micro-batch; the bubble's part of a step falls as data ranks grow.
BUBBLES = ((32, 32), (32, 128), (128, 128), (128, 512))
BUBBLE_RANKS = (1, 2, 4, 8, 16, 32)


def throughput_rows() -> list[Row]:
    rows = []
    for billions, heads, hidden, layers, tensor, pipeline, gpus, batch, micro, chunk, paper in TABLE:
        shape = make_shape(layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, positions=SEQUENCE, tied=1)
        footprint = footprint_of(shape, kernels=MEGATRON, states=STATES)
        machine = find_machine(f"dgx-a100:{gpus // 8}")
        data = gpus // tensor // pipeline
        setup = Setup(
            tokens=micro * SEQUENCE,
            sequence=SEQUENCE,
            accumulate=batch // data // micro,
            stage=0,
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            chunks=layers // pipeline // chunk if chunk else 1,
        )
        prediction = simulate(footprint, machine, setup, Way(activations="recompute"))
        ours = prediction.tflops * footprint.flops(SEQUENCE, recompute=True) / footprint.flops(SEQUENCE)
        what = f"{billions:g}B on {gpus} GPUs"
        rows.append(Row("Megatron table 1: end to end", what, "TFLOP/s per GPU", paper, ours, THROUGHPUT))
    return rows


def bubble_rows() -> list[Row]:
    """The part of a step's ideal time that a pipeline idles, from the simulated step; the paper's is (n - d) / b'."""
    rows = []
    shape = make_shape(layers=128, hidden=4096, heads=32, vocabulary=VOCABULARY)
    footprint = footprint_of(shape, kernels=MEGATRON, states=STATES)
    for gpus, batches in BUBBLES:
        for data in BUBBLE_RANKS:
            pipeline = gpus // data
            setup = Setup(tokens=SEQUENCE, sequence=SEQUENCE, accumulate=batches // data, pipeline=pipeline, stage=0)
            machine = replace(find_machine("dgx-a100:16"), network_bandwidth=1e18)
            taken = simulate(footprint, machine, setup).phases()
            full = taken["first forward"] + taken["forward"] + taken["backward"]
            ideal = setup.accumulate * (full / setup.passes)
            rows.append(
                Row(
                    "Megatron figure 6: bubble", f"{gpus} GPUs, batch {batches}, data {data}", "of a step",
                    (gpus - data) / batches, full / ideal - 1, EXACT,
                )
            )  # fmt: skip
    return [row for row in rows if row.paper > 0]
