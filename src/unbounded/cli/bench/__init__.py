"""`unbounded bench host|disk`: how fast the native core is here, compared with a reference in the same run."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from unbounded.cli.parser import whole_number

if TYPE_CHECKING:
    from unbounded.cli.bench.disk_engine import Result

HELP = "measure the host optimizers or the disk engine, compared with a reference in the same run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="host|disk", required=True)
    host = kinds.add_parser("host", help="compare the host optimizers with torch.optim")
    host.add_argument(
        "--parameters",
        type=whole_number(1, 1 << 40),
        default=100_000_000,
        metavar="N",
        help="number of parameters (default: 100 million)",
    )
    host.add_argument(
        "--threads", type=whole_number(1, 4096), default=None, metavar="N", help="threads for both (default: all cores)"
    )
    host.add_argument(
        "--repetitions",
        type=whole_number(1, 10_000),
        default=7,
        metavar="N",
        help="repetitions; the median counts (default: 7)",
    )
    disk_parser = kinds.add_parser("disk", help="compare the disk engine with the best plain O_DIRECT loop")
    disk_parser.add_argument("--path", default=".", help="a folder on the disk to measure (default: the current one)")
    disk_parser.add_argument(
        "--size",
        type=whole_number(1, 1 << 30),
        default=1024,
        metavar="MIB",
        help="MiB read and written each time (default: 1024)",
    )
    disk_parser.add_argument(
        "--repetitions",
        type=whole_number(1, 10_000),
        default=7,
        metavar="N",
        help="repetitions; the median counts (default: 7)",
    )


def run(args: argparse.Namespace) -> int:
    if args.kind == "host":
        from unbounded.cli.bench.host_optimizer import run_host

        run_host(parameters=args.parameters, threads=args.threads, repetitions=args.repetitions)
        return 0
    from unbounded.cli.bench.disk_engine import show

    results = disk(args.path, size_bytes=args.size << 20, repetitions=args.repetitions)
    show(results, f"disk engine on {os.path.realpath(args.path)}")
    return 0


def disk(path: str | os.PathLike[str], **options: Any) -> list[Result]:
    """Measures the disk engine on `path`; see `disk_engine.disk` for the options."""
    from unbounded.cli.bench.disk_engine import disk as measure_disk

    return measure_disk(path, **options)
