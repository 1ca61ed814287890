"""`unbounded report TRACE`: how busy each lane was, how many ran at once, and a picture of them."""

from __future__ import annotations

import argparse

HELP = "show a trace: how busy each lane was and how many ran at once; --svg draws it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file written by unbounded.trace or `unbounded train --trace`")
    parser.add_argument("--svg", metavar="FILE", default=None, help="also draw the lanes into this file")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from unbounded.observe import drawing
    from unbounded.planner.sizes import format_bytes

    spans = drawing.read_spans(args.trace)
    table = Table("lane", "busy", "of the time", "moved", title=str(args.trace))
    for use in drawing.lane_uses(spans):
        moved = format_bytes(use.num_bytes) if use.num_bytes else ""
        table.add_row(use.lane, f"{use.busy_seconds:.3f} s", f"{use.part:.0%}", moved)
    console = Console()
    console.print(table)
    for count, seconds in drawing.at_once(spans).items():
        console.print(f"{count} lanes at once: {seconds:.3f} s")
    if args.svg:
        Path(args.svg).write_text(drawing.draw(spans))
        console.print(f"drawn to {args.svg}")
    return 0
