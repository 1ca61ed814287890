"""Times Unbounded and DeepSpeed with its optimizer off the GPU, one after the other on the same machine.

    python benchmarks/steps/against_deepspeed.py [--cases 7b,3b,1.3b-disk] [--steps 5]

Every measurement runs in its own process (`throughput.py`), so that neither affects the other's memory. Both run
eagerly and with compiled blocks; DeepSpeed runs with recomputed blocks and again with all activations kept, while
Unbounded decides what blocks keep. The ratios are DeepSpeed's better time divided by ours, once for its eager runs and
once for its compiled ones; `--eager-peer` leaves out the latter, which take a minute or two each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("throughput.py")
MODES: tuple[tuple[str, ...], ...] = ((), ("--compile",))
Peer = tuple[int, bool]  # tokens per step, whether its blocks are compiled


@dataclass(frozen=True)
class Case:
    """One size: DeepSpeed's best setting that fits, and what we compare with it."""

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
    """One line per batch size; if the process fails, its last line of output."""
    command = [sys.executable, str(SCRIPT), "--size", case.size, "--batches", case.batches, "--steps", str(steps)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        Console(stderr=True).print(f"{' '.join(arguments)}: exit code {done.returncode}: {last}", markup=False)
    return lines


def run(name: str, case: Case, steps: int, table: Table, peer_modes: tuple[tuple[str, ...], ...]) -> None:
    peer: dict[Peer, float] = {}
    for compiled, activations in itertools.product(peer_modes, ("recompute", "keep")):
        arguments = (*case.deepspeed, "--activations", activations, *compiled)
        lines = measure(case, steps, "--engine", "deepspeed", *arguments)
        show(table, name, " ".join(("DeepSpeed", *arguments)), lines, {})
        for line in lines:
            key = line["tokens"], line["compile"]
            peer[key] = min(line["step_s"], peer.get(key, line["step_s"]))
    for arguments, compiled in itertools.product(case.ours, MODES):
        lines = measure(case, steps, *arguments, *compiled)
        show(table, name, " ".join(("Unbounded", *arguments, *compiled)), lines, peer)


def show(table: Table, name: str, what: str, lines: list[dict[str, Any]], peer: dict[Peer, float]) -> None:
    for line in lines:
        print(what, json.dumps(line), flush=True)
        others = [peer.get((line["tokens"], is_compiled)) for is_compiled in (False, True)]
        table.add_row(
            name,
            what,
            f"{line['tokens']:,}",
            f"{line['step_s']:.3f}",
            *(f"{other / line['step_s']:.2f}" if other else "-" for other in others),
            f"{line.get('gpu_gib', 0):.1f}",
            f"{line['host_gib']:.1f}",
            f"{line['first_step_s']:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="7b,3b,1.3b-disk", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--eager-peer", action="store_true", help="run DeepSpeed only with eager blocks")
    options = parser.parse_args()
    peer_modes = MODES[:1] if options.eager_peer else MODES
    ratios = ("to eager", "to compiled")
    table = Table("model", "engine", "tokens per step", "s/step", *ratios, "GPU GiB", "host GiB", "s to first step")
    for name in options.cases.split(","):
        run(name, CASES[name], options.steps, table, peer_modes)
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
