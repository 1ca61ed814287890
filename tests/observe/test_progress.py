"""What a person and a program see of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from unbounded.observe.amounts import show_bytes, show_count, show_seconds
from unbounded.observe.metrics import Metrics, read_metrics
from unbounded.observe.progress import Lines, Silence, Step, Tier, describe, render, sparkline
from unbounded.observe.report.display import Steady, open_progress

STEP = Step(
    step=20,
    num_steps=50,
    loss=2.5,
    tokens_per_second=12_345.6,
    tflops=0.0421,
    seconds_left=125,
    norm=0.75,
    lr=3e-4,
    epoch=1.25,
    seconds=0.5,
    peak_tflops=0.1,
    tiers={"device": Tier(3 << 20, 4 << 20), "host": Tier(2 << 30, None), "disk": Tier(0, 1 << 30)},
    lanes={"compute": 0.7, "disk read": 0.95},
)


def test_a_step_is_one_line_with_its_numbers() -> None:
    assert describe(STEP) == (
        "step 20/50  loss 2.5000  norm 0.75  lr 0.0003  epoch 1.25  0.5 s per step, 42% of peak  "
        "12,346 tokens/s  0.0421 TFLOP/s  device 3.0 MiB host 2.0 GiB  disk read 95%  2:05 left"
    )


def test_lines_are_printed_at_the_first_the_last_and_every_nth_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(every=4)
    for step in range(1, 11):
        lines.show(Step(step, 10, 1.0, 1.0, 1.0, 0.0))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/10", "4/10", "8/10", "10/10"]


def test_the_panel_shows_bars_of_memory_against_budgets() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(render(STEP, [5.0, 4.0, 3.0, 2.5]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 20/50" in shown
    assert "3.0 MiB of 4.0 MiB" in shown
    assert "busiest: disk read 95%" in shown
    assert "2:05 left, 0.5 s per step, 42% of peak" in shown
    assert "norm 0.75  lr 0.0003  epoch 1.25" in shown
    assert "██████████░░░░░░░░░░░░░░" in shown  # 20 of 50, told apart without colour
    assert len(shown.splitlines()) == 6


def test_only_the_first_rank_speaks_and_only_a_terminal_gets_a_panel() -> None:
    assert isinstance(open_progress(speaks=False, log_every=1), Silence)
    shown = open_progress(speaks=True, log_every=1)
    assert isinstance(shown, Steady)
    assert isinstance(shown.inner, Lines)  # pytest's output is no terminal


def test_a_sparkline_falls_with_its_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([float("nan")]) == ""
    assert len(sparkline([float(i) for i in range(1000)])) == 24


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(1536), "1.5 KiB"),
        (show_bytes(5), "5 B"),
        (show_seconds(59.4), "59 s"),
        (show_seconds(3725), "1:02:05"),
        (show_count(6_700_000_000), "6.7 B"),
        (show_count(812), "812"),
    ],
)
def test_amounts_are_readable(shown: str, expected: str) -> None:
    assert shown == expected


def test_metrics_are_json_lines_and_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(1, 5):
        metrics.write("step", step, loss=1.0 / step)
    metrics.write("eval", 4, loss=0.5)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # torn by a kill
    resumed = Metrics(tmp_path, after_step=2)
    resumed.write("step", 3, loss=9.0)
    resumed.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 9.0),
    ]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
