"""The report of a run: what is drawn, that it needs nothing else, and that it follows a run live."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.observe.runs import UNITS, make_run, make_trace
from unbounded.cli import main
from unbounded.errors import PlanError
from unbounded.observe.progress import Step, Tier
from unbounded.observe.report.charts import Line, draw_chart, thin_out
from unbounded.observe.report.lane_chart import draw_lanes
from unbounded.observe.report.notebook import Notebook
from unbounded.observe.report.page import Report, read_report
from unbounded.observe.report.serving import open_server
from unbounded.observe.report.svg import round_marks
from unbounded.observe.spans import border_steps, passes_of, read_spans


class Page(HTMLParser):
    """The words and the addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action")]


def test_the_page_is_one_file_with_every_chart_tier_and_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run[bold]")  # to rich, a style
    assert main(["report", str(run), "--html"]) == 0
    assert "run[bold]\n" in re.sub(" +\n", "\n", capsys.readouterr().out)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.addresses == []  # no other file or machine is asked for anything
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "<script" not in text
    words = " ".join(page.words)
    for expected in (
        *("30 of 60", "loss", "gradient norm", "learning rate", "tokens per second", "held-out loss", "2.5"),
        *("step 30: training 2", "step 30: held out (dashed) 2.5"),
        *("3.0 MiB of 4.0 MiB, 75%", "1.0 GiB of 2.0 GiB, 50%", "0 B, no budget"),
        *("step 1 begins", "step 2", "forward", "backward", "disk read: blocks.1, 50 ms, 95.4 MiB at 2.00 GB/s"),
        *("compute: blocks.2 backward, 14 ms", "compute: blocks.2 forward, 10 ms"),
    ):
        assert expected in words, expected


def test_lanes_are_drawn_in_proportion_with_borders_phases_and_shares(tmp_path: Path) -> None:
    drawn = draw_lanes(read_spans(make_trace(tmp_path / "t.json")))
    root = ElementTree.fromstring(drawn)
    named = {title.text: shape for group in root.iter(f"{{{SVG}}}g") for title, shape in [list(group)]}
    first = named["compute: blocks.0 forward, 10 ms"]
    whole = 195.0  # ms: where the second step ends
    assert float(first.get("width", 0)) == pytest.approx(1000 * 10 / whole, abs=0.1)
    assert sum(name is not None and name.startswith("step ") for name in named) == 2
    spans = [shape for shape in root.iter(f"{{{SVG}}}rect") if "span" in (shape.get("class") or "").split()]
    phases = [shape.get("class") for shape in spans]
    assert phases.count("span forward") == phases.count("span backward") == 6
    assert phases.count("span") == 2
    backward = [shape for shape in spans if shape.get("class") == "span backward"]
    assert {shape.get("height") for shape in backward} != {first.get("height")}  # told apart without colour
    shares = [text.text for text in root.iter(f"{{{SVG}}}text") if text.get("class") == "busy"]
    busy = (2 * 3 * (10 + 14)) / whole
    assert shares == [f"{busy:.0%} busy", f"{100 / whole:.0%} busy"]


SVG = "http://www.w3.org/2000/svg"


def test_passes_are_inferred_where_nobody_marked_them(tmp_path: Path) -> None:
    spans = read_spans(make_trace(tmp_path / "t.json", marked=False))
    assert [name for name, _, _ in passes_of(spans)] == ["forward", "backward"] * 2
    assert [round(start, 3) for _, start in border_steps(spans)] == [0.0, 0.1]
    assert len(UNITS) == 3


def test_a_trace_alone_and_a_run_without_one_are_reports_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace(tmp_path / "t.json")
    assert (
        main(["report", str(tmp_path / "t.json"), "--svg", str(tmp_path / "t.svg"), "--html", str(tmp_path / "t.html")])
        == 0
    )
    assert "disk read" in capsys.readouterr().out
    assert ElementTree.parse(tmp_path / "t.svg").getroot().tag == f"{{{SVG}}}svg"
    run = make_run(tmp_path / "run")
    (run / "trace.json").unlink()
    assert "There is no trace" in read_report(run).body()
    assert main(["report", str(run), "--svg", str(tmp_path / "u.svg")]) == 2
    assert "no trace to draw" in capsys.readouterr().err


def test_pages_and_drawings_replace_only_their_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "mine.html").write_text("<html>mine")
    for flag in ("--html", "--svg"):
        assert main(["report", str(run), flag, str(tmp_path / "mine.html")]) == 2
        assert "was not written by unbounded" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "<html>mine"
    for _ in range(2):
        assert main(["report", str(run), "--html"]) == 0
    with pytest.raises(PlanError, match="is not a run"):
        read_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00 theirs")
    with pytest.raises(PlanError, match="is not a run"):
        read_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert main(["report", str(tmp_path)]) == 0
    assert "no step was recorded yet" in capsys.readouterr().out


def test_a_name_cannot_put_anything_into_the_page() -> None:
    spans_name = "<script>alert(1)</script>"
    page = Report(spans_name, steps=[{"step": 1, "loss": 1.0, "memory": {spans_name: 5}}]).page()
    assert "<script" not in page


def test_what_somebody_wrote_into_the_metrics_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=3)
    odd = {"loss": "high", "seconds": None, "lr": [1], "memory": {"host": "much"}, "budget": 5, "epoch": 0.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 4, **odd}) + "\n")
        file.write(json.dumps({"kind": "eval", "step": 4, "loss": "low"}) + "\n")
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert re.search(r"step .* 1 .* 4 ", capsys.readouterr().out)
    assert read_report(run).series("loss")[-1][0] == 3


def test_charts_of_long_and_of_broken_runs_stay_small_and_finite() -> None:
    points = [(float(step), float("nan") if step % 7 == 0 else 1.0 / (step + 1)) for step in range(100_000)]
    thin = thin_out(points)
    assert len(thin) == 240
    assert thin[-1][0] == 99_999.0
    assert thin[-1][1] == pytest.approx(1e-5, rel=0.01)
    assert "nan" not in draw_chart("loss", [Line("loss", points)])
    assert draw_chart("loss", [Line("loss", [])]) == ""
    assert round_marks(0.0, 10.0) == [0.0, 5.0, 10.0]
    assert "step 1: loss 2" in draw_chart("loss", [Line("loss", [(1.0, 2.0)])])


def test_the_live_page_follows_the_run_on_loopback_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with open_server(lambda: read_report(run)) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        page = urllib.request.urlopen(address + "/").read().decode()
        assert "3 of 6" in page
        assert "setInterval" in page
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 4, "loss": 1.0}\n{"kind": "st')  # the run goes on and writes more
        assert "4 of 6" in urllib.request.urlopen(address + "/body").read().decode()
        for request, code in ((address + "/etc/passwd", 404), (_from_elsewhere(address), 403)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request)
            assert caught.value.code == code
        server.shutdown()
        thread.join()


def _from_elsewhere(address: str) -> urllib.request.Request:
    return urllib.request.Request(address, headers={"Host": "elsewhere.example:80"})


def test_a_notebook_shows_one_picture_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    shown: list[str] = []

    class Output:
        def update(self, content: str) -> None:
            shown.append(content)

    display = ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda content, display_id: Output()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = Notebook()
    notebook.say("training <a model>")
    for step in range(1, 101):
        notebook.show(Step(step, 100, 5.0 - step / 100, 10.0, 1.0, 0.0, tiers={"host": Tier(1 << 20, 2 << 20)}))
    notebook.close()
    assert 2 < len(shown) < 50  # not once per step
    for part in ("100 of 100", "training &lt;a model&gt;", "1.0 MiB of 2.0 MiB, 50%", "<svg"):
        assert part in shown[-1]
