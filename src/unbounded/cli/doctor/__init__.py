"""`unbounded doctor`: what this machine has, what is wrong, and one remedy for each problem."""

from __future__ import annotations

import argparse
import os
import tempfile

from unbounded.cli.doctor.finding import BROKEN, NOTE, OK, Finding

HELP = "check this machine (native core, disk, memory, GPU), with a remedy for each problem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", default=None, help="a folder for the disk tier (default: the temporary folder)")


def run(args: argparse.Namespace) -> int:
    findings = examine(args.path)
    show(findings)
    return 1 if any(finding.status == BROKEN for finding in findings) else 0


def examine(path: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Checks everything; one finding each, in the order of the table."""
    from unbounded.cli.doctor import checks

    folder = os.fspath(path) if path is not None else tempfile.gettempdir()
    core = checks.native_core()
    findings = [checks.python_and_torch(), core]
    if core.status != BROKEN:
        findings += [checks.simd(), *checks.disk_path(folder)]
    return [*findings, checks.host_memory(), checks.huge_pages(), checks.memory_lock(), *checks.gpus()]


def show(findings: list[Finding]) -> None:
    """Prints the table, then one line for each problem."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {OK: "green", NOTE: "yellow", BROKEN: "red"}
    console = Console()
    table = Table(show_header=False)
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(finding.name, f"[{colour}]{finding.status}[/{colour}]", escape(finding.value))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(f"{finding.status}: {escape(finding.name)}: {escape(finding.remedy)}", soft_wrap=True)
