"""The page of a run, drawn from its folder. `read_report` reads, `Report` draws; nothing here waits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from unbounded.errors import PlanError
from unbounded.observe.amounts import show_seconds
from unbounded.observe.metrics import FILE_NAME, is_metrics, read_metrics
from unbounded.observe.report.charts import Line, draw_chart, draw_tiers, show_number
from unbounded.observe.report.lane_chart import draw_lanes
from unbounded.observe.spans import TraceSpan, read_spans
from unbounded.paths import expand_home

BEGINNING = "<!doctype html>\n<!-- a run of unbounded -->\n"
"""Every page begins like this; a file that does not is not ours to replace."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--soft:#666;--paper:#fff;--line:#ddd;--main:#1f5fa8;--other:#b4581a}
@media(prefers-color-scheme:dark){:root{--ink:#eee;--soft:#aaa;--paper:#16181b;--line:#333;--main:#7fb2ee;--other:#eda15f}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:1.5rem auto;max-width:1240px;
padding:0 1rem}h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
p{color:var(--soft);margin:.2rem 0}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem;margin:.8rem 0}.tile{border:1px solid var(--line);border-radius:6px;
padding:.4rem .8rem}.tile b{display:block;font-size:1.15rem}.tile span{color:var(--soft);font-size:.8rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:.6rem}svg{width:100%;height:auto}
svg.tiers{max-width:860px}svg.lanes{color:var(--ink)}.title{font:600 13px sans-serif;fill:var(--ink)}
.axis{font:11px sans-serif;fill:var(--soft)}.grid{stroke:var(--line)}
.line{fill:none;stroke:var(--main);stroke-width:1.8}
.line1{stroke:var(--other);stroke-dasharray:6 4}.dot{fill:var(--other);stroke:none}.hit{fill:transparent}
.hit:hover{fill:#8882}.used{fill:var(--main)}.budget{fill:none;stroke:var(--soft);stroke-dasharray:3 3}
.scroll{overflow-x:auto}.scroll svg{min-width:900px}.span:hover{opacity:.7}
"""

_LIVE = """<script>
setInterval(async () => {
  const answer = await fetch("body").catch(() => null);
  if (answer && answer.ok) document.querySelector("main").innerHTML = await answer.text();
}, 2000);
</script>"""


@dataclass(frozen=True)
class Report:
    """A run so far. In a notebook it shows itself."""

    name: str
    about: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[TraceSpan] = ()

    def page(self, *, live: bool = False) -> str:
        """One HTML file that needs no other; if `live`, it asks its server for news."""
        title = f"<title>{escape(self.name)} - unbounded</title>"
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
        )
        main = f"<main>{self.body()}</main>{_LIVE if live else ''}"
        return f'{BEGINNING}<html lang="en"><head>{head}</head><body>{main}</body></html>\n'

    def body(self) -> str:
        """What is inside the page."""
        return "".join([f"<h1>{escape(self.name)}</h1>", self._tiles(), self._charts(), self._memory(), self._lanes()])

    def _repr_html_(self) -> str:
        return f'<div class="unbounded"><style>{_STYLE}</style>{self.body()}</div>'

    def series(self, key: str) -> list[tuple[float, float]]:
        """One number of each step, by step."""
        return [(line["step"], line[key]) for line in self.steps if isinstance(line.get(key), (int, float))]

    def tiers(self) -> dict[str, tuple[int, int | None]]:
        """What each tier held after the last step, and its budget."""
        last = self.steps[-1] if self.steps else {}
        used, budgets = _table(last.get("memory")), _table(last.get("budget"))
        return {name: (int(held), budgets.get(name)) for name, held in used.items()}

    def _tiles(self) -> str:
        if not self.steps:
            return "<p>No step is finished yet.</p>"
        last = self.steps[-1]
        total = self.about.get("steps")
        tiles = [("step", f"{last['step']:,}" + (f" of {total:,}" if isinstance(total, int) else ""))]
        for key, name, show in _TILES:
            if isinstance(last.get(key), (int, float)):
                tiles.append((name, show(last[key])))
        if self.evaluations:
            tiles.append(("held-out loss", show_number(self.evaluations[-1]["loss"])))
        cells = "".join(f'<div class="tile"><span>{escape(n)}</span><b>{escape(v)}</b></div>' for n, v in tiles)
        return f'<div class="tiles">{cells}</div>'

    def _charts(self) -> str:
        held_out = Line("held out (dashed)", [(line["step"], line["loss"]) for line in self.evaluations])
        drawn = [
            draw_chart("loss", [Line("training", self.series("loss")), held_out]),
            draw_chart("gradient norm", [Line("norm", self.series("grad_norm"))], from_zero=True),
            draw_chart("learning rate", [Line("lr", self.series("lr"))], from_zero=True),
            draw_chart(
                "throughput, tokens per second", [Line("tokens/s", self.series("tokens_per_second"))], from_zero=True
            ),
        ]
        return f'<div class="charts">{"".join(drawn)}</div>'

    def _memory(self) -> str:
        tiers = self.tiers()
        return f"<h2>memory of each tier against its budget</h2>{draw_tiers(tiers)}" if tiers else ""

    def _lanes(self) -> str:
        if not self.spans:
            return (
                "<h2>lanes of a step</h2><p>There is no trace. Train with --trace FILE, or give one with --trace.</p>"
            )
        drawn = draw_lanes(self.spans)
        words = "Solid: forward. Striped: backward. Dashed: where a step begins. Point at anything to see its numbers."
        return f'<h2>lanes of a step</h2><p>{words}</p><div class="scroll">{drawn}</div>'


_TILES = (
    ("loss", "loss", show_number),
    ("grad_norm", "gradient norm", show_number),
    ("lr", "learning rate", show_number),
    ("epoch", "epoch", lambda value: f"{value:.2f}"),
    ("tokens_per_second", "tokens per second", show_number),
    ("seconds", "seconds per step", lambda value: f"{value:.3g}" if value < 60 else show_seconds(value)),
    ("tflops", "TFLOP/s per device", lambda value: f"{value:.3g}"),
)


def read_report(run: str | Path, trace: str | Path | None = None) -> Report:
    """What the folder of a run holds now, or a trace alone; raises if `run` is neither."""
    path = expand_home(run)
    if path.is_file():
        return Report(path.name, spans=read_spans(path))
    if not (path / FILE_NAME).is_file() or not is_metrics(path / FILE_NAME):
        raise PlanError(
            f'"{path}" is not a run: it has no {FILE_NAME} of ours. Give the --output of `unbounded train`, or a trace.'
        )
    about = _read_about(path)
    lines = read_metrics(path / FILE_NAME), read_metrics(path / FILE_NAME, "eval")
    evaluations = [line for line in lines[1] if isinstance(line.get("loss"), (int, float))]
    return Report(path.resolve().name, about, lines[0], evaluations, _find_spans(path, about, trace))


def _find_spans(path: Path, about: Mapping[str, Any], trace: str | Path | None) -> list[TraceSpan]:
    if trace is not None:
        return read_spans(trace)
    told = about.get("trace")
    with suppress(OSError, PlanError):  # a trace that was moved away, or that the run has not written yet
        return read_spans(told) if isinstance(told, str) else read_spans(path / "trace.json")
    return []


def _read_about(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        return _table(json.loads((path / "run.json").read_text()))
    return {}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
