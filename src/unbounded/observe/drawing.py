"""A trace as a picture and as numbers: the lanes over time, how busy each was, how many ran at once. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from unbounded.errors import PlanError
from unbounded.observe.lanes import LANES

COLOURS = {
    "compute": "#2f6f4f",
    "gather": "#7a5ea8",
    "reduce": "#a85e8f",
    "host-to-device": "#3b76b8",
    "device-to-host": "#5fa3d9",
    "host optimizer": "#c98a1b",
    "disk read": "#b5483a",
    "disk write": "#d98274",
}
LABEL_WIDTH, WIDTH, ROW = 120, 1000, 26


@dataclass(frozen=True)
class Span:
    lane: str
    start: float  # seconds from the first span
    stop: float
    num_bytes: int


@dataclass(frozen=True)
class LaneUse:
    """One lane over a trace: seconds in which it ran, the part of the whole, bytes moved."""

    lane: str
    busy_seconds: float
    part: float
    num_bytes: int


def read_spans(path: str | Path) -> list[Span]:
    """The spans of a trace file, in order of their start."""
    try:
        document = json.loads(Path(path).read_text())
        events = document["traceEvents"] if isinstance(document, dict) else document
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        marks = [(tracks[e["pid"], e["tid"]], e["ts"], e["dur"], e) for e in events if e.get("ph") == "X"]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{str(path)!r} is not a trace ({error}). Give a file written by unbounded.trace.") from error
    if not marks:
        raise PlanError(f"the trace {str(path)!r} has no spans. Record at least one step.")
    origin = min(start for _, start, _, _ in marks)
    spans = [
        Span(track.partition(" (")[0], (start - origin) / 1e6, (start + length - origin) / 1e6, _bytes_of(event))
        for track, start, length, event in marks
    ]
    return sorted(spans, key=lambda span: span.start)


def _bytes_of(event: dict[str, object]) -> int:
    arguments = event.get("args")
    return int(arguments.get("bytes", 0)) if isinstance(arguments, dict) else 0


def lane_uses(spans: list[Span]) -> list[LaneUse]:
    """How busy each lane was, in the order of the lanes of a step."""
    whole = max(span.stop for span in spans)
    uses = []
    for lane in _lanes_of(spans):
        mine = [span for span in spans if span.lane == lane]
        busy = sum(stop - start for start, stop in merge([(span.start, span.stop) for span in mine]))
        uses.append(LaneUse(lane, busy, busy / whole if whole else 0.0, sum(span.num_bytes for span in mine)))
    return uses


def at_once(spans: list[Span]) -> dict[int, float]:
    """For every number of lanes, the seconds in which just so many ran."""
    edges: list[tuple[float, int]] = []
    for lane in _lanes_of(spans):
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


def draw(spans: list[Span]) -> str:
    """An SVG with one row a lane."""
    lanes, whole = _lanes_of(spans), max(span.stop for span in spans)
    height = ROW * (len(lanes) + 1) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL_WIDTH + WIDTH + 10} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LABEL_WIDTH + WIDTH + 10}" height="{height}" fill="white"/>',
    ]
    for row, lane in enumerate(lanes):
        top = 4 + row * ROW
        parts.append(f'<text x="4" y="{top + 16}">{escape(lane)}</text>')
        parts.append(f'<rect x="{LABEL_WIDTH}" y="{top}" width="{WIDTH}" height="{ROW - 4}" fill="#f3f3f3"/>')
        for start, stop in merge([(span.start, span.stop) for span in spans if span.lane == lane]):
            left, width = LABEL_WIDTH + start / whole * WIDTH, max(0.5, (stop - start) / whole * WIDTH)
            colour = COLOURS.get(lane, "#777777")
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}"/>')
    parts += _axis(whole, 4 + len(lanes) * ROW)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(whole: float, top: float) -> list[str]:
    marks = [whole * part / 5 for part in range(6)]
    return [
        f'<text x="{LABEL_WIDTH + mark / whole * WIDTH:.1f}" y="{top + 14}" fill="#555555" '
        f'text-anchor="{"end" if mark == marks[-1] else "start"}">{mark:.3g} s</text>'
        for mark in marks
    ]


def _lanes_of(spans: list[Span]) -> list[str]:
    present = {span.lane for span in spans}
    return [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
