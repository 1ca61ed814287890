"""A trace read back: its spans, how busy each lane was, and how many ran at once. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbounded.errors import PlanError
from unbounded.observe.lanes import COMPUTE, LANES, MARKS, PASS, STEP

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class TraceSpan:
    """Work in a lane; times are seconds from the first span. `phase` is forward or backward, if that is known."""

    lane: str
    start: float
    stop: float
    num_bytes: int
    name: str = ""
    phase: str = ""


@dataclass(frozen=True)
class LaneUse:
    """One lane over a trace: seconds in which it ran, the part of the whole, bytes moved."""

    lane: str
    busy_seconds: float
    part: float
    num_bytes: int


def read_spans(path: str | Path) -> list[TraceSpan]:
    """The spans of a trace file, in order of their start."""
    try:
        spans = _parse(_load(Path(path)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise PlanError(f'"{path}" is not a trace ({error}). Give a file written by unbounded.trace.') from None
    if not spans:
        raise PlanError(f'the trace "{path}" has no spans. Record at least one step.')
    return spans


def _load(path: Path) -> list[dict[str, Any]]:
    if path.exists() and not path.is_file():
        raise PlanError(f'"{path}" is not a file. Give a file written by unbounded.trace.')
    document = json.loads(path.read_text())
    events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
    return events


def _parse(events: list[dict[str, Any]]) -> list[TraceSpan]:
    tracks = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e.get("name") == "thread_name"}
    marks = [(tracks[e["pid"], e["tid"]], float(e["ts"]), float(e["dur"]), e) for e in events if e.get("ph") == "X"]
    if not all(math.isfinite(start) and math.isfinite(length) and length >= 0 for _, start, length, _ in marks):
        raise ValueError("a span has no beginning or no end")
    origin = min((start for _, start, _, _ in marks), default=0.0)
    spans = [
        TraceSpan(
            lane=track.partition(" (")[0],
            name=str(event.get("name", "")),
            start=(start - origin) / 1e6,
            stop=(start + length - origin) / 1e6,
            num_bytes=int((event.get("args") or {}).get("bytes", 0)),
        )
        for track, start, length, event in marks
    ]
    return sorted(spans, key=lambda span: span.start)


def lane_uses(spans: Sequence[TraceSpan]) -> list[LaneUse]:
    """How busy each lane was, in the order of the lanes of a step."""
    whole = max(span.stop for span in spans)
    uses = []
    for lane in lanes_of(spans):
        mine = [span for span in spans if span.lane == lane]
        busy = sum(stop - start for start, stop in merge([(span.start, span.stop) for span in mine]))
        uses.append(LaneUse(lane, busy, busy / whole if whole else 0.0, sum(span.num_bytes for span in mine)))
    return uses


def at_once(spans: list[TraceSpan]) -> dict[int, float]:
    """For every number of lanes, the seconds in which exactly so many ran."""
    edges: list[tuple[float, int]] = []
    for lane in lanes_of(spans):
        for start, stop in merge([(span.start, span.stop) for span in spans if span.lane == lane]):
            edges += [(start, 1), (stop, -1)]
    seconds: dict[int, float] = {}
    running, before = 0, 0.0
    for time, change in sorted(edges):
        seconds[running] = seconds.get(running, 0.0) + time - before
        running, before = running + change, time
    return {count: spent for count, spent in sorted(seconds.items()) if spent > 0}


def merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of `intervals` as disjoint ones in order."""
    union: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def lanes_of(spans: Sequence[TraceSpan]) -> list[str]:
    """The lanes that have spans, in the order of the lanes of a step."""
    present = {span.lane for span in spans if span.lane not in MARKS}
    return [lane for lane in LANES if lane in present] + sorted(present - set(LANES))


def passes_of(spans: Sequence[TraceSpan]) -> list[tuple[str, float, float]]:
    """The forward and backward passes, as they were marked or as inferred from the order of the units."""
    marked = [(span.name, span.start, span.stop) for span in spans if span.lane == PASS]
    if marked:
        return marked
    passes: list[tuple[str, float, float]] = []
    for span in _infer_phases([span for span in spans if span.lane == COMPUTE]):
        if passes and passes[-1][0] == span.phase:
            passes[-1] = (span.phase, passes[-1][1], max(passes[-1][2], span.stop))
        else:
            passes.append((span.phase, span.start, span.stop))
    return passes


def border_steps(spans: Sequence[TraceSpan]) -> list[tuple[str, float]]:
    """Where each step begins: as marked, otherwise where a forward pass follows a backward one."""
    marked = [(span.name, span.start) for span in spans if span.lane == STEP]
    if marked:
        return marked
    starts, before = [], BACKWARD
    for phase, start, _ in passes_of(spans):
        if phase == FORWARD and before == BACKWARD:
            starts.append(start)
        before = phase
    return [(f"pass {number}", start) for number, start in enumerate(starts, start=1)]


def mark_phases(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """The spans; those that compute within a pass get its phase."""
    passes = passes_of(spans)

    def phase_at(time: float) -> str:
        return next((phase for phase, start, stop in passes if start <= time <= stop), "")

    middle = [(span.start + span.stop) / 2 for span in spans]
    return [
        replace(span, phase=phase_at(time)) if span.lane == COMPUTE else span
        for span, time in zip(spans, middle, strict=True)
    ]


def _infer_phases(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """A unit is visited in the forward and, the last one first, again in the backward."""
    open_units: list[str] = []
    marked = []
    for span in spans:
        if span.name in open_units:
            del open_units[open_units.index(span.name) :]
            marked.append(replace(span, phase=BACKWARD))
        else:
            open_units.append(span.name)
            marked.append(replace(span, phase=FORWARD))
    return marked
