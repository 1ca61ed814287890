"""Training with the optimizer's states on disk: how much of the disk's rate a step reaches.

    python benchmarks/disk/disk_tier.py [--size 1.3b] [--batches 8] [--path .] [--steps 6] [--turns 2] [--compile]

A step reads and writes every state once. The reference is the raw O_DIRECT loop of `unbounded bench disk`, reading
and writing at once on its best number of threads. Disks vary within minutes, so loops and training take turns, loops
first and last, and medians count. The goal is 0.85.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unbounded.cli.bench import disk_engine

SCRIPT = Path(__file__).parents[1] / "steps" / "throughput.py"
WANTED = 0.85


def raw_rates(path: str, size_bytes: int, repetitions: int) -> dict[int, list[float]]:
    """GB/s read and written together, by the number of threads of each loop."""
    rates: dict[int, list[float]] = {threads: [] for threads in disk_engine.THREAD_COUNTS}
    with disk_engine.opened(Path(path), size_bytes) as bench:
        for _ in range(repetitions):
            for threads, found in rates.items():
                start = time.perf_counter()
                disk_engine.raw_both(bench, threads)
                found.append(2 * size_bytes / 1e9 / (time.perf_counter() - start))
    return rates


def train(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--size", options.size, "--batches", options.batches]
    command += ["--steps", str(options.steps), "--plan", "optimizer=disk", f"disk_path={options.path}"]
    done = subprocess.run([*command, *(["--compile"] if options.compile else [])], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3b")
    parser.add_argument("--batches", default="8")
    parser.add_argument("--path", default=".")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2, help="how often it trains")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--raw-size", type=int, default=2048, metavar="MIB", help="read, and written, by a raw loop")
    parser.add_argument("--repetitions", type=int, default=2, help="of the raw loops in each of their turns")
    options = parser.parse_args()
    raw, lines = [raw_rates(options.path, options.raw_size << 20, options.repetitions)], []
    for _ in range(options.turns):
        lines.append(train(options))
        raw.append(raw_rates(options.path, options.raw_size << 20, options.repetitions))
    by_threads = {threads: statistics.median(itertools.chain(*(turn[threads] for turn in raw))) for threads in raw[0]}
    best = max(by_threads, key=lambda threads: by_threads[threads])
    ours = [2 * line["tiers"]["disk"] * 2**30 / 1e9 / line["step_s"] for line in lines]
    table = Table("disk, reading and writing at once", "GB/s")
    for turn, line, rate in itertools.zip_longest(raw, lines, ours):
        table.add_row(f"raw loops, {best}+{best} threads", " ".join(f"{each:.2f}" for each in turn[best]))
        if line is not None:
            what = f"training, {line['step_s']:.2f} s a step ({line['host_gib']} GiB of host memory)"
            table.add_row(what, f"{rate:.2f}")
    Console(width=100).print(table)
    ratio = statistics.median(ours) / by_threads[best]
    print(f"training / raw: {ratio:.3f}" + ("" if ratio >= WANTED else f", below {WANTED}"))
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
