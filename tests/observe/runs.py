"""A made-up run folder and trace, with numbers that tests can look for in what is drawn."""

from __future__ import annotations

import json
from pathlib import Path

from unbounded.observe.metrics import Metrics
from unbounded.observe.perfetto import SpanRecord, write

MS = 1_000_000
UNITS = ("blocks.0", "blocks.1", "blocks.2")


def make_run(folder: Path, steps: int = 30) -> Path:
    metrics = Metrics(folder)
    for step in range(1, steps + 1):
        metrics.write(
            "step",
            step,
            loss=5.0 - step / 10,
            grad_norm=2.0,
            lr=1e-3,
            epoch=step / 20,
            seconds=0.25,
            tokens_per_second=4096.0,
            tflops=0.5,
            memory={"device": 3 << 20, "host": 1 << 30, "disk": 0},
            budget={"device": 4 << 20, "host": 2 << 30},
        )
    metrics.write("eval", steps, loss=2.5, perplexity=12.2)
    metrics.close()
    (folder / "run.json").write_text(json.dumps({"format": "unbounded run", "steps": 2 * steps}))
    make_trace(folder / "trace.json")
    return folder


def make_trace(path: Path, *, marked: bool = True) -> Path:
    """Two steps of 100 ms: 40 forward, 50 backward; a disk read during the first half of each."""
    spans = []
    for number, origin in ((1, 0), (2, 100 * MS)):
        for index, unit in enumerate(UNITS):
            spans.append(SpanRecord("compute", unit, origin + 12 * index * MS, origin + (12 * index + 10) * MS))
        for index, unit in enumerate(reversed(UNITS)):
            begin = origin + (40 + 16 * index) * MS
            spans.append(SpanRecord("compute", unit, begin, begin + 14 * MS))
        spans.append(SpanRecord("disk read", "blocks.1", origin, origin + 50 * MS, 100_000_000))
        if marked:
            spans.append(SpanRecord("step", f"step {number}", origin, origin + 95 * MS))
            spans.append(SpanRecord("pass", "forward", origin, origin + 38 * MS))
            spans.append(SpanRecord("pass", "backward", origin + 40 * MS, origin + 90 * MS))
    write(path, spans, origin_ns=0, epoch_ns=0, rank=0, num_dropped=0)
    return path
