"""What the watchdog costs a collective that is not late: gathers that are watched and gathers that are not, in turns.

    python benchmarks/watchdog.py [--repetitions N]

Two ranks on this machine gather small tensors over an axis. Blocks of gathers with and without the watch take turns,
each going first in turn. The median ratio of neighbours counts; the goal is at most 1.03. It needs two cores that
nobody else uses: on a busy machine the ratio is that of the scheduler. Exits with 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from unbounded.ranks.axis import Axis
from unbounded.ranks.mesh import world_axis

AT_MOST = 1.03
SIZES = (4 << 10, 64 << 10, 1 << 20)
BLOCK = 100


def seconds(gather: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(BLOCK):
        gather()
    return time.perf_counter() - start


def measure(num_bytes: int, repetitions: int) -> tuple[float, float]:
    """All ranks must call this. The ratio of a watched gather to an unwatched one, and the latter in us."""
    axis, alone = world_axis(), Axis("world", dist.group.WORLD)
    shard, full = torch.zeros(num_bytes // 8), torch.zeros(num_bytes // 4)
    plain: Callable[[], None] = lambda: alone.gather(full, shard, "a unit")  # noqa: E731
    watched: Callable[[], None] = lambda: axis.gather(full, shard, "a unit")  # noqa: E731
    for gather in (plain, watched):
        seconds(gather)
    ratios, plains = [], []
    for turn in range(repetitions):
        times = [seconds(gather) for gather in ((watched, plain) if turn % 2 else (plain, watched))]
        ratios.append(times[0] / times[1] if turn % 2 else times[1] / times[0])
        plains.append(times[1] if turn % 2 else times[0])
    return statistics.median(ratios), statistics.median(plains) / BLOCK * 1e6


def work(rank: int, port: int, repetitions: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    missed = False
    for num_bytes in SIZES:
        ratio, microseconds = measure(num_bytes, repetitions)
        missed = missed or ratio > AT_MOST
        if rank == 0:
            print(f"{num_bytes >> 10:5} KiB: {microseconds:6.0f} us, watched {ratio:.3f} x", flush=True)
    dist.barrier()
    os._exit(int(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=41)
    args = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, port, args.repetitions)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    missed = ranks[0].exitcode != 0
    print("missed: watched gathers take too long" if missed else "every ratio is reached")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
