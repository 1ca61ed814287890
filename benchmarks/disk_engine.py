"""The disk engine against the best raw O_DIRECT loop of the same run: read, write, and both at once.

    python benchmarks/disk_engine.py [--path FOLDER] [--size MIB] [--repetitions N] [--backend NAME]

Wanted: at least 0.95 x the loop on its best number of threads for transfers of 16 MiB and more, and 0.9 x for
reading and writing at once. Exits with 1 where a ratio is lower. The engine starts without knowing the disk: what it
learns about it, it learns in the run.
"""

from __future__ import annotations

import argparse
import sys

from unbounded.cli.bench_disk import Result, disk, show

WANTED = {"read": 0.95, "write": 0.95, "read and write": 0.9}
TRANSFERS = tuple(size << 20 for size in (16, 64, 256))


def is_reached(result: Result) -> bool:
    return result.ratio >= WANTED[result.what]


def main() -> int:
    parser = argparse.ArgumentParser(description="The disk engine against the best raw O_DIRECT loop.")
    parser.add_argument("--path", default=".", help="a folder on the disk to measure")
    parser.add_argument("--size", type=int, default=2048, metavar="MIB", help="MiB read and written each time")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--backend", default="auto", choices=("auto", "threads", "io_uring"))
    args = parser.parse_args()
    results = disk(
        args.path,
        size_bytes=args.size << 20,
        transfers=TRANSFERS,
        repetitions=args.repetitions,
        backend=args.backend,
    )
    show(results, f"disk engine ({args.backend})")
    missed = [result for result in results if not is_reached(result)]
    for result in missed:
        print(f"{result.what}, {result.transfer_bytes >> 20} MiB: {result.ratio:.2f} < {WANTED[result.what]}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
