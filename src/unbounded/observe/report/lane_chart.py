"""Draws the lanes of a step over time: one row each with its busy share, step borders, and both passes told apart."""

from __future__ import annotations

from collections.abc import Sequence

from unbounded.observe.amounts import show_bytes
from unbounded.observe.report.svg import Scale, element, round_marks, text, titled
from unbounded.observe.spans import (
    BACKWARD,
    FORWARD,
    LaneUse,
    TraceSpan,
    border_steps,
    lane_uses,
    lanes_of,
    mark_phases,
    passes_of,
)

BEGINNING = '<svg xmlns="http://www.w3.org/2000/svg" '
"""Every picture begins like this; a file that does not is not ours to replace."""

LEFT, WIDTH, RIGHT, ROW, HEAD = 120, 1000, 90, 30, 44
MOST_SPANS = 6000

STYLE = """
.lane-title{font-weight:600}.lane-row{fill:#8881}.span{fill:#3b76b8}.span.forward{fill:#2f6f4f}
.span.backward{fill:url(#backward);stroke:#8a4b12;stroke-width:.6}.pass{fill:#8882}.pass.backward{fill:url(#pass)}
.border{stroke:currentColor;stroke-width:1.4;stroke-dasharray:5 3}
svg{color:#222}text{fill:currentColor;font:12px sans-serif}
"""
PATTERNS = (
    '<defs><pattern id="backward" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#e3a857"/><rect width="2.5" height="6" fill="#8a4b12"/></pattern>'
    '<pattern id="pass" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#8881"/><rect width="1.5" height="7" fill="#8886"/></pattern></defs>'
)


def draw_lanes(spans: Sequence[TraceSpan]) -> str:
    """The whole picture with its own style, so that it can be a file by itself."""
    marked = mark_phases(list(spans))
    lanes, whole = lanes_of(marked), max(span.stop for span in marked)
    across = Scale(0.0, whole, LEFT, LEFT + WIDTH)
    height = HEAD + ROW * len(lanes) + 26
    parts = [f"<style>{STYLE}</style>", PATTERNS, *_draw_passes(marked, across, height - 26)]
    for row, use in enumerate(lane_uses(marked)):
        mine = [span for span in marked if span.lane == use.lane]
        parts += _draw_lane(use, mine, across, HEAD + row * ROW)
    parts += _draw_borders(marked, across, height - 26)
    parts += [
        text(f"{mark:.3g} s", across(mark), height - 8, text_anchor="middle") for mark in round_marks(0, whole, 8)
    ]
    size = (
        f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" class="lanes" role="img" aria-label="lanes of the traced steps"'
    )
    return f"{BEGINNING}{size}>{''.join(parts)}</svg>\n"


def _draw_lane(use: LaneUse, spans: list[TraceSpan], across: Scale, top: int) -> list[str]:
    moved = f", {show_bytes(use.num_bytes)}" if use.num_bytes else ""
    row = element("rect", x=LEFT, y=top, width=WIDTH, height=ROW - 6, class_="lane-row")
    parts = [
        text(use.lane, 4, top + 16, class_="lane-title"),
        titled(row, f"{use.lane}: busy {use.part:.0%} of the time{moved}"),
        text(f"{use.part:.0%} busy", LEFT + WIDTH + 8, top + 16, class_="busy"),
    ]
    for span in _thin_out(spans):
        bar = element(
            "rect",
            x=across(span.start),
            y=top + (4 if span.phase == BACKWARD else 0),
            width=max(across(span.stop) - across(span.start), 0.6),
            height=ROW - (14 if span.phase == BACKWARD else 6),
            class_=f"span {span.phase}".strip(),
        )
        parts.append(titled(bar, describe_span(span)))
    return parts


def describe_span(span: TraceSpan) -> str:
    """What a span's tooltip says."""
    seconds = span.stop - span.start
    phase = f" {span.phase}" if span.phase else ""
    rate = f" at {span.num_bytes / seconds / 1e9:.2f} GB/s" if span.num_bytes and seconds > 0 else ""
    moved = f", {show_bytes(span.num_bytes)}{rate}" if span.num_bytes else ""
    return f"{span.lane}: {span.name}{phase}, {seconds * 1e3:.3g} ms{moved}"


def _thin_out(spans: list[TraceSpan]) -> list[TraceSpan]:
    """The longest spans, if there are more than a picture can show."""
    return sorted(spans, key=lambda span: span.start - span.stop)[:MOST_SPANS]


def _draw_passes(spans: Sequence[TraceSpan], across: Scale, bottom: int) -> list[str]:
    parts = []
    for phase, start, stop in passes_of(spans):
        width = across(stop) - across(start)
        band = element("rect", x=across(start), y=22, width=width, height=bottom - 22, class_=f"pass {phase}")
        parts.append(titled(band, f"{phase}: {(stop - start) * 1e3:.3g} ms"))
        if width > 56:
            parts.append(text(phase, across(start) + 3, 36, class_="phase"))
        elif width > 12:
            parts.append(text("F" if phase == FORWARD else "B", across(start) + 2, 36, class_="phase"))
    return parts


def _draw_borders(spans: Sequence[TraceSpan], across: Scale, bottom: int) -> list[str]:
    parts = []
    for name, start in border_steps(spans):
        x = across(start)
        parts.append(titled(element("line", x1=x, x2=x, y1=4, y2=bottom, class_="border"), f"{name} begins"))
        parts.append(text(name, x + 4, 15, class_="step"))
    return parts
