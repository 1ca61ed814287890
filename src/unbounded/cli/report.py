"""`unbounded report RUN`: a run or a trace in numbers, as a page, as a picture of its lanes, or live."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.cli.parser import whole_number
from unbounded.paths import expand_home

if TYPE_CHECKING:
    from unbounded.observe.report.page import Report

HELP = "show a run or a trace in numbers, as a page (--html), live (--watch), or as a picture of its lanes (--svg)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="the --output folder of `unbounded train`, or a file written by unbounded.trace"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const="",
        default=None,
        help="write one page that needs nothing else (default: report.html in the run's folder)",
    )
    parser.add_argument("--svg", metavar="FILE", default=None, help="draw the lanes to this file (default: none)")
    parser.add_argument(
        "--trace", metavar="FILE", default=None, help="the trace whose lanes are shown (default: the run's own)"
    )
    parser.add_argument(
        "--watch",
        metavar="PORT",
        nargs="?",
        type=whole_number(0, 65_535),
        const=8265,
        default=None,
        help="serve the page live on 127.0.0.1 until Ctrl-C (default port: 8265)",
    )


def run(args: argparse.Namespace) -> int:
    from unbounded.observe.replacing import check_replaceable, write_file
    from unbounded.observe.report import lane_chart, page

    html_path = None
    if args.html is not None:
        folder = expand_home(args.run)
        named = args.html or (folder if folder.is_dir() else Path()) / "report.html"
        html_path = check_replaceable(named, "the page", page.BEGINNING.encode())
    svg_path = check_replaceable(args.svg, "the drawing", lane_chart.BEGINNING.encode()) if args.svg else None
    report = page.read_report(args.run, args.trace)
    show(report)
    if svg_path is not None:
        write_file(svg_path, _draw(report))
        print(f"drawn to {svg_path}")
    if html_path is not None:
        write_file(html_path, report.page())
        print(f"written to {html_path}")
    if args.watch is not None:
        _watch(args.run, args.trace, args.watch)
    return 0


def _draw(report: Report) -> str:
    from unbounded.errors import PlanError
    from unbounded.observe.report.lane_chart import draw_lanes

    if not report.spans:
        raise PlanError("there is no trace to draw. Give one with --trace, or train with --trace FILE.")
    return draw_lanes(report.spans)


def show(report: Report) -> None:
    """Prints the last step of a run, and the use of its lanes."""
    from rich.console import Console
    from rich.table import Table

    from unbounded.observe import spans
    from unbounded.planner.sizes import format_bytes

    console = Console(markup=False)  # names may hold brackets
    if not report.steps and not report.spans:
        console.print(f"{report.name}: no step was recorded yet")
    if report.steps:
        first, last = report.steps[0], report.steps[-1]
        table = Table("", "first step", "last step", title=report.name)
        for key in ("step", "loss", "grad_norm", "lr", "epoch", "seconds", "tokens_per_second"):
            table.add_row(key, *(f"{line[key]:.6g}" if key in line else "" for line in (first, last)))
        console.print(table)
        for name, (used, budget) in report.tiers().items():
            console.print(f"{name}: {format_bytes(used)}" + (f" of {format_bytes(budget)}" if budget else ""))
    if report.spans:
        table = Table("lane", "busy", "of the time", "moved", title="lanes")
        for use in spans.lane_uses(report.spans):
            moved = format_bytes(use.num_bytes) if use.num_bytes else ""
            table.add_row(use.lane, f"{use.busy_seconds:.3f} s", f"{use.part:.0%}", moved)
        console.print(table)
        for count, seconds in spans.at_once(list(report.spans)).items():
            console.print(f"{count} lanes at once: {seconds:.3f} s")


def _watch(run: str, trace: str | None, port: int) -> None:
    from unbounded.observe.report.page import read_report
    from unbounded.observe.report.serving import open_server

    with open_server(lambda: read_report(run, trace), port) as server:
        print(f"watching at http://127.0.0.1:{server.server_port}/ until Ctrl-C", flush=True)
        server.serve_forever()
