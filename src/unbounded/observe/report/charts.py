"""Line charts of numbers over the steps of a run, and bars of tiers against their budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unbounded.observe.amounts import show_bytes
from unbounded.observe.report.svg import Scale, element, finite_range, round_marks, text, titled

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 26
MOST_POINTS = 240
Show = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One series; the first of a chart is solid and the others dashed, so that they differ without colour."""

    name: str
    points: Sequence[tuple[float, float]]


def show_number(value: float) -> str:
    """Four digits, as people write them."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_chart(title: str, lines: Sequence[Line], show: Show = show_number, *, from_zero: bool = False) -> str:
    """A chart over steps; every point has a tooltip."""
    lines = [Line(line.name, thin_out(line.points)) for line in lines if line.points]
    if not lines:
        return ""
    steps = finite_range([step for line in lines for step, _ in line.points])
    low, high = finite_range([value for line in lines for _, value in line.points])
    low, high = (min(low, 0.0) if from_zero else low), high + (high - low) * 0.05
    across = Scale(*steps, LEFT, WIDTH - RIGHT)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*_axes(across, up, show)]
    for index, line in enumerate(lines):
        parts += _draw_line(line, across, up, show, index)
    named = " and ".join(line.name for line in lines)
    parts.append(text(title, LEFT, 16, class_="title"))
    parts.append(text(named if len(lines) > 1 else "", WIDTH - RIGHT, 16, class_="axis", text_anchor="end"))
    return element("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img", aria_label=title)


def draw_tiers(tiers: Mapping[str, tuple[int, int | None]]) -> str:
    """One bar per tier: what is used of its budget, also in words."""
    row, width, left = 34, 560, 80
    parts = []
    for index, (name, (used, budget)) in enumerate(tiers.items()):
        top = index * row
        share = used / budget if budget else 0.0
        words = (
            f"{show_bytes(used)} of {show_bytes(budget)}, {share:.0%}" if budget else f"{show_bytes(used)}, no budget"
        )
        parts.append(text(name, 0, top + 17, class_="title"))
        parts.append(element("rect", x=left, y=top + 4, width=width - left, height=18, class_="budget"))
        full = element(
            "rect",
            x=left,
            y=top + 4,
            width=max((width - left) * min(share, 1.0), 1.0 if used else 0.0),
            height=18,
            class_="used",
        )
        parts.append(titled(full, f"{name}: {words}"))
        parts.append(text(words, width + 10, top + 17, class_="axis"))
    height = max(len(tiers) * row, 1)
    return element("svg", "".join(parts), viewBox=f"0 0 {width + 260} {height}", class_="tiers", role="img")


def thin_out(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of a stretch, without values that are not finite."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) <= most:
        return finite
    edges = [index * len(finite) // most for index in range(most + 1)]
    stretches = [finite[a:b] for a, b in pairwise(edges)]
    return [(stretch[-1][0], sum(value for _, value in stretch) / len(stretch)) for stretch in stretches]


def _axes(across: Scale, up: Scale, show: Show) -> list[str]:
    parts = []
    for value in round_marks(up.low, up.high):
        y = up(value)
        parts.append(element("line", x1=across.start, x2=across.end, y1=y, y2=y, class_="grid"))
        parts.append(text(show(value), across.start - 6, y + 4, class_="axis", text_anchor="end"))
    for value in round_marks(across.low, across.high):
        parts.append(text(f"{value:g}", across(value), HEIGHT - 8, class_="axis", text_anchor="middle"))
    return parts


def _draw_line(line: Line, across: Scale, up: Scale, show: Show, index: int) -> list[str]:
    places = [(across(step), up(value)) for step, value in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [element("path", d=path, class_=f"line line{index}")]
    if len(places) == 1 or index:  # a few points are drawn as dots
        parts += [element("circle", cx=x, cy=y, r=3.0, class_=f"dot line{index}") for x, y in places[:60]]
    for (x, _), (step, value) in zip(places, line.points, strict=True):
        slot = max((across.end - across.start) / max(len(places), 1), 2.0)
        hit = element("rect", x=x - slot / 2, y=TOP, width=slot, height=HEIGHT - TOP - BOTTOM, class_="hit")
        parts.append(titled(hit, f"step {step:g}: {line.name} {show(value)}"))
    return parts
