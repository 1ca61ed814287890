"""Training with the optimizer's states on disk: how much of the disk a step gets, and what the disk gives by itself.

    python benchmarks/disk_tier.py [--size 1.3b] [--batches 8] [--path .] [--steps 6] [--compile]

A step reads and writes every state once. The reference is the raw O_DIRECT loop of `unbounded bench disk`, reading
and writing at once on its best number of threads, before and after the training in the same run. Wanted: 0.85.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unbounded.cli import bench_disk

SCRIPT = Path(__file__).with_name("throughput.py")
WANTED = 0.85


def raw_rates(path: str, size_bytes: int, repetitions: int) -> dict[int, list[float]]:
    """GB/s read and written together, by the number of threads of each loop."""
    rates: dict[int, list[float]] = {threads: [] for threads in bench_disk.THREAD_COUNTS}
    with bench_disk.opened(Path(path), size_bytes) as bench:
        for _ in range(repetitions):
            for threads, found in rates.items():
                start = time.perf_counter()
                bench_disk.raw_both(bench, threads)
                found.append(2 * size_bytes / 1e9 / (time.perf_counter() - start))
    return rates


def train(options: argparse.Namespace) -> dict[str, float]:
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
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--raw-size", type=int, default=2048, metavar="MIB", help="read, and written, by a raw loop")
    parser.add_argument("--repetitions", type=int, default=2, help="of the raw loops, before and after")
    options = parser.parse_args()
    before = raw_rates(options.path, options.raw_size << 20, options.repetitions)
    line = train(options)
    after = raw_rates(options.path, options.raw_size << 20, options.repetitions)
    by_threads = {threads: statistics.median(before[threads] + after[threads]) for threads in before}
    best = max(by_threads, key=lambda threads: by_threads[threads])
    ours = 2 * line["tiers"]["disk"] * 2**30 / 1e9 / line["step_s"]  # type: ignore[index]
    table = Table("disk, reading and writing at once", "GB/s")
    table.add_row(f"raw loops, {best}+{best} threads, before", " ".join(f"{rate:.2f}" for rate in before[best]))
    table.add_row(f"raw loops, {best}+{best} threads, after", " ".join(f"{rate:.2f}" for rate in after[best]))
    table.add_row(f"training, {line['step_s']:.2f} s a step ({line['host_gib']} GiB of host memory)", f"{ours:.2f}")
    Console(width=100).print(table)
    ratio = ours / by_threads[best]
    print(f"training / raw: {ratio:.2f}" + ("" if ratio >= WANTED else f", below {WANTED}"))
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
