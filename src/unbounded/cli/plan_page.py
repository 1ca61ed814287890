"""A plan as one self-contained page: the memory map, the lanes of a step, the scaling curve. No script, no network."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from unbounded.planner.evaluation import Candidate
from unbounded.planner.explanation import KINDS, count, describe, seconds
from unbounded.planner.plan import TIERS
from unbounded.planner.sizes import format_bytes
from unbounded.planner.step.loads import LANES, PHASES
from unbounded.planner.step.prediction import NAMES

COLOURS = dict(zip(KINDS, ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9498a0", "#d0d4da"), strict=True))
_BUSY, _PACING = "#8fb3e6", "#d6456b"
WIDTH, COLUMNS = 900, 103
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f6f6f4; padding: 1em; overflow-x: auto; } h2 { margin-top: 2em; } svg { width: 100%; height: auto; }
text { font: 13px system-ui, sans-serif; fill: #222; } .faint { fill: #777; }
@media (prefers-color-scheme: dark) {
  body { background: #181a1d; color: #ddd; } pre { background: #24272c; } text { fill: #ddd; } .faint { fill: #999; }
}
"""


BEGINNING = "<!doctype html>\n<!-- a plan of unbounded -->\n"
"""Every page begins like this; a file that does not is not ours to replace."""


def render(candidate: Candidate, scaling: Sequence[Candidate]) -> str:
    """The page as text."""
    title = f"{candidate.footprint.name} on {candidate.prediction.machine.name}"
    parts = [
        f'{BEGINNING}<html lang="en"><head><meta charset="utf-8"><title>{_say(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_say(title)}</h1>",
        f"<pre>{_say(chr(10).join(_wrap(describe(candidate))))}</pre>",
        "<h2>Memory of one rank</h2>",
        memory_map(candidate),
        f"<h2>The lanes of a step of {_say(seconds(candidate.seconds))}</h2>",
        lanes_of_step(candidate),
    ]
    if len(scaling) > 1:
        parts += ["<h2>Scaling with constant tokens per device</h2>", scaling_curve(scaling)]
    parts.append("<p>Predicted by arithmetic over the machine's rates; nothing was run.</p></body></html>")
    return "\n".join(parts)


def _wrap(lines: Sequence[str]) -> list[str]:
    """Lines that fit the page; what is left of one goes on below its first words."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, COLUMNS, subsequent_indent=13 * " ", drop_whitespace=len(line) > COLUMNS)
        or [""]
    ]


def memory_map(candidate: Candidate) -> str:
    """One bar per tier, as long as what a rank may use of it, filled by kind of state."""
    held, room = candidate.prediction.held, candidate.room
    shapes, top = [], 10
    for tier in TIERS:
        whole, left = max(room[tier], sum(held[tier].values()), 1.0), 80.0
        scale = (WIDTH - 100) / whole
        shapes.append(_text(0, top + 22, tier))
        shapes.append(f'<rect x="80" y="{top}" width="{WIDTH - 100}" height="32" fill="none" stroke="#999"/>')
        for kind in KINDS:
            taken = held[tier].get(kind, 0.0)
            if taken:
                label = f"{tier}, {kind}: {format_bytes(taken)}"
                shapes.append(_bar(left, top, taken * scale, 32, COLOURS[kind], label))
                left += taken * scale
        used = f"{format_bytes(sum(held[tier].values()))} of {format_bytes(room[tier])}"
        shapes.append(_text(80, top + 50, used, "faint"))
        top += 66
    for index, kind in enumerate(KINDS):
        shapes.append(_bar(80 + index * 138, top, 14, 14, COLOURS[kind], kind))
        shapes.append(_text(98 + index * 138, top + 12, kind))
    return _svg(shapes, top + 30, "memory map")


def lanes_of_step(candidate: Candidate) -> str:
    """Phases from left to right, lanes from top to bottom; the lane that sets a phase's pace in red."""
    prediction = candidate.prediction
    phases, total = prediction.phases(), prediction.seconds or 1.0
    used = [lane for lane in LANES if any(prediction.lane(phase, lane) for phase in PHASES)]
    shapes, left, scale = [], 225.0, (WIDTH - 235) / total
    for row, lane in enumerate(used):
        shapes.append(_text(0, 44 + row * 26, NAMES[lane]))
    for phase in PHASES:
        longest = max(prediction.lane(phase, lane) for lane in LANES)
        if not phases[phase]:
            continue
        width = phases[phase] * scale
        shapes.append(f'<line x1="{left:.1f}" x2="{left:.1f}" y1="24" y2="{30 + 26 * len(used)}" stroke="#999"/>')
        if width > 60:
            shapes.append(_text(left + 3, 16, phase, "faint"))
        for row, lane in enumerate(used):
            busy = prediction.lane(phase, lane)
            if busy:
                colour = _PACING if busy == longest else _BUSY
                label = f"{NAMES[lane]} in the {phase}: {seconds(busy / longest * phases[phase])}"
                shapes.append(_bar(left, 30 + row * 26, width * busy / longest, 20, colour, label))
        left += width
    return _svg(shapes, 40 + 26 * len(used), "lanes of a step")


def scaling_curve(candidates: Sequence[Candidate]) -> str:
    """TFLOP/s of a device over the number of devices; a flat line is linear scaling."""
    rates = [candidate.prediction.tflops for candidate in candidates]
    top = max(rates) * 1.15 or 1.0
    step = (WIDTH - 160) / max(1, len(candidates) - 1)
    points = [(80 + index * step, 220 - 200 * rate / top) for index, rate in enumerate(rates)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    shapes = [
        f'<line x1="60" x2="{WIDTH - 40}" y1="220" y2="220" stroke="#999"/>',
        f'<polyline points="{path}" fill="none" stroke="#4269d0" stroke-width="2.5"/>',
    ]
    for (x, y), candidate, rate in zip(points, candidates, rates, strict=True):
        devices = candidate.prediction.machine.num_devices
        label = f"{devices} devices: {rate:.3g} TFLOP/s each, {count(candidate.prediction.tokens_per_second)} tokens/s"
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#4269d0"><title>{_say(label)}</title></circle>')
        shapes += [_text(x - 14, y - 12, f"{rate:.3g}"), _text(x - 14, 240, f"{devices}", "faint")]
    shapes.append(_text(60, 262, "devices; TFLOP/s of each", "faint"))
    return _svg(shapes, 270, "scaling curve")


def _svg(shapes: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_say(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg>'
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{colour}">'
        f"<title>{_say(label)}</title></rect>"
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    marked = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{marked}>{_say(words)}</text>'


def _say(words: str) -> str:
    return html.escape(words)
