"""The trace file: Chrome's JSON event format, which ui.perfetto.dev opens, one track per lane."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unbounded.observe.lanes import LANES

BEGINNING = '{"displayTimeUnit": "ms", "otherData": {"epoch_ns": '
"""Every trace file begins like this; a file that does not is not ours to replace."""

_ROWS_PER_LANE = 64


class SpanRecord(NamedTuple):
    """One finished piece of work in a lane."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0


def layout(spans: Iterable[SpanRecord]) -> list[tuple[SpanRecord, int]]:
    """Give each span a row within its lane so that no two on a row overlap, which a viewer would draw wrongly."""
    free_from: dict[str, list[int]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        rows = free_from.setdefault(span.lane, [])
        row = next((index for index, end_ns in enumerate(rows) if end_ns <= span.start_ns), len(rows))
        row = min(row, _ROWS_PER_LANE - 1)
        if row == len(rows):
            rows.append(0)
        rows[row] = max(rows[row], span.end_ns)
        placed.append((span, row))
    return placed


def events(spans: Iterable[SpanRecord], *, origin_ns: int, rank: int) -> Iterator[dict[str, Any]]:
    """The file's events: names of the tracks first, then every span with its time in microseconds."""
    placed = layout(spans)
    lanes = [*LANES, *sorted({span.lane for span, _ in placed} - set(LANES))]
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    tracks = sorted({(lanes.index(span.lane), row) for span, row in placed} | {(i, 0) for i in range(len(LANES))})
    for lane, row in tracks:
        thread = lane * _ROWS_PER_LANE + row + 1
        name = lanes[lane] if row == 0 else f"{lanes[lane]} ({row + 1})"
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span, row in placed:
        yield {
            "ph": "X",
            "pid": rank,
            "tid": lanes.index(span.lane) * _ROWS_PER_LANE + row + 1,
            "name": span.name,
            "cat": span.lane,
            "ts": (span.start_ns - origin_ns) / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
            **({"args": {"bytes": span.num_bytes}} if span.num_bytes else {}),
        }


def write(path: Path, spans: list[SpanRecord], *, origin_ns: int, epoch_ns: int, rank: int, num_dropped: int) -> None:
    """Write the whole file under another name and rename it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(6)}.partial")
    try:
        with partial.open("w") as file:
            file.write(f'{BEGINNING}{epoch_ns}, "rank": {rank}, "dropped_spans": {num_dropped}}},\n"traceEvents": [\n')
            for index, event in enumerate(events(spans, origin_ns=origin_ns, rank=rank)):
                file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
