"""ZeRO (Rajbhandari et al. 2020), table 1: memory of model states on a device, by stage and ranks."""

from __future__ import annotations

from unbounded.planner.models.footprint import Footprint, StateBytes, UnitFootprint
from unbounded.planner.papers.table import MEMORY, Row
from unbounded.planner.step.loads import Setup, unit_bytes

# fp16 weights and gradients, fp32 master and moments: 2 + 2 + 12 bytes.
ADAM = StateBytes(weights=2, gradients=2, optimizer=12, remainder=0, summed=2)
RANKS = (1, 4, 16, 64, 256, 1024)
# GB per device for stages 1, 2 and 3
TABLE = {
    7.5: (
        (120, 120, 120),
        (52.5, 41.3, 30),
        (35.6, 21.6, 7.5),
        (31.4, 16.6, 1.88),
        (30.4, 15.4, 0.47),
        (30.1, 15.1, 0.12),
    ),
    128: (
        (2048, 2048, 2048),
        (896, 704, 512),
        (608, 368, 128),
        (536, 284, 32),
        (518, 263, 8),
        (513, 257, 2),
    ),
    1000: (
        (16000, 16000, 16000),
        (7000, 5500, 4000),
        (4750, 2875, 1000),
        (4187, 2218, 250),
        (4046, 2054, 62.5),
        (4011, 2013, 15.6),
    ),
}


def memory_rows() -> list[Row]:
    rows = []
    for billions, lines in TABLE.items():
        part = UnitFootprint("model", int(billions * 1e9))
        footprint = Footprint("model", (part,), hidden=1, states=ADAM)
        for ranks, line in zip(RANKS, lines, strict=True):
            for stage, paper in enumerate(line, start=1):
                unit = unit_bytes(part, footprint, Setup(stage=stage, data=ranks))
                ours = (unit.weights + unit.gradients + unit.optimizer) / 1e9
                what = f"{billions:g}B, stage {stage}, {ranks} ranks"
                rows.append(Row("ZeRO table 1: model states per device", what, "GB", paper, ours, MEMORY))
    return rows
