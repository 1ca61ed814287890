"""Unbounded and DeepSpeed with its optimizer off the GPU, one after the other on the same machine: who takes how long.

    python benchmarks/against_deepspeed.py [--cases 7b,3b,1.3b-disk] [--steps 5]

Every measurement is a process of its own (`throughput.py`), so that neither finds the other's memory. DeepSpeed
runs eagerly, as its users do, with its blocks recomputed and again with all activations kept; Unbounded eagerly and
with compiled blocks, and decides by itself what blocks keep. The ratio is DeepSpeed's better time by ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("throughput.py")


@dataclass(frozen=True)
class Case:
    """One size: DeepSpeed's best setting that fits, and what we hold against it."""

    size: str
    batches: str
    deepspeed: tuple[str, ...]
    ours: tuple[tuple[str, ...], ...]


CASES = {
    "7b": Case("7b", "2,8", ("--stage", "3"), (("--plan", "device_bytes=24GiB"), ())),
    "3b": Case("3b", "2,8", ("--stage", "2"), (("--plan", "device_bytes=15GiB"), ())),
    "1.3b-disk": Case(
        "1.3b", "8", ("--stage", "3", "--optimizer", "nvme"), (("--plan", "optimizer=disk", "disk_path=."),)
    ),
    "tiny": Case("tiny", "2", ("--stage", "3"), (("--plan", "device_bytes=24MiB"),)),
}


def measure(case: Case, steps: int, *arguments: str) -> list[dict[str, Any]]:
    """One line a batch size; where the process fails, its last line of output."""
    command = [sys.executable, str(SCRIPT), "--size", case.size, "--batches", case.batches, "--steps", str(steps)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        Console(stderr=True).print(f"{' '.join(arguments)}: exit code {done.returncode}: {last}", markup=False)
    return lines


def run(name: str, case: Case, steps: int, table: Table) -> None:
    peer: dict[int, float] = {}
    for activations in ("recompute", "keep"):
        arguments = (*case.deepspeed, "--activations", activations)
        lines = measure(case, steps, "--engine", "deepspeed", *arguments)
        show(table, name, " ".join(("DeepSpeed", *arguments)), lines, {})
        for line in lines:
            peer[line["tokens"]] = min(line["step_s"], peer.get(line["tokens"], line["step_s"]))
    for arguments in case.ours:
        for compiled in ((), ("--compile",)):
            lines = measure(case, steps, *arguments, *compiled)
            show(table, name, " ".join(("Unbounded", *arguments, *compiled)), lines, peer)


def show(table: Table, name: str, what: str, lines: list[dict[str, Any]], peer: dict[int, float]) -> None:
    for line in lines:
        print(what, json.dumps(line), flush=True)
        other = peer.get(line["tokens"])
        table.add_row(
            name,
            what,
            f"{line['tokens']:,}",
            f"{line['step_s']:.3f}",
            f"{other / line['step_s']:.2f}" if other else "-",
            f"{line.get('gpu_gib', 0):.1f}",
            f"{line['host_gib']:.1f}",
            f"{line['first_step_s']:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="7b,3b,1.3b-disk", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    table = Table("model", "engine", "tokens a step", "s/step", "ratio", "GPU GiB", "host GiB", "s to first step")
    for name in options.cases.split(","):
        run(name, CASES[name], options.steps, table)
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
