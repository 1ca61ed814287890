"""`unbounded bench disk`: the disk engine against the best plain O_DIRECT loop, in one run.

The reference is a loop of os.preadv/os.pwritev in blocks of 8 MiB on 1, 2, 4 and 8 threads, over the same file and
the same memory; it shares nothing with the engine. Its best number of threads is found first. Then loop
and engine take turns, each going first in turn, so that other load on the machine hits both, and the median ratio of
neighbouring repetitions counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unbounded.native.disk import DiskEngine, DiskFile, DiskHandle, place
from unbounded.native.disk.bindings import READ, WRITE
from unbounded.native.host_memory import host_buffer, touch

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 8 << 20
BUFFER_BYTES = 256 << 20  # for each direction; loop and engine cycle through it
THREAD_COUNTS = (1, 2, 4, 8)
IN_FLIGHT_BYTES = 128 << 20


@dataclass(frozen=True)
class Result:
    """One line of the table: median rates in GB/s, and the median ratio of neighbouring repetitions."""

    what: str
    transfer_bytes: int
    raw: float
    raw_threads: int
    ours: float
    ratio: float


@dataclass(frozen=True)
class Bench:
    """The file under test (reads from its first half, writes to its second) and the memory for both."""

    file: DiskFile
    fd: int
    size_bytes: int
    buffers: tuple[torch.Tensor, torch.Tensor]

    def base(self, operation: int) -> int:
        return 0 if operation == READ else self.size_bytes


def raw_loop(bench: Bench, operation: int, num_threads: int) -> None:
    """Moves `size_bytes` in blocks on `num_threads` threads, with nothing but preadv or pwritev."""
    view, base = bench.buffers[operation].numpy().data, bench.base(operation)
    offsets = iter(range(0, bench.size_bytes, BLOCK_BYTES))
    errors: list[Exception] = []

    def work() -> None:
        call = os.preadv if operation == READ else os.pwritev
        try:
            for offset in offsets:
                at = offset % BUFFER_BYTES
                if call(bench.fd, [view[at : at + BLOCK_BYTES]], base + offset) != BLOCK_BYTES:
                    raise OSError("short transfer in the reference loop")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def raw_both(bench: Bench, num_threads: int) -> None:
    """The reading and the writing loop together, each on `num_threads` threads."""
    writer = threading.Thread(target=raw_loop, args=(bench, WRITE, num_threads))
    writer.start()
    raw_loop(bench, READ, num_threads)
    writer.join()


def engine_loop(bench: Bench, operations: tuple[int, ...], transfer_bytes: int) -> None:
    """The same bytes through the engine, in transfers of `transfer_bytes` with several in flight."""
    depth = max(2, IN_FLIGHT_BYTES // transfer_bytes)
    queues: dict[int, deque[DiskHandle]] = {operation: deque() for operation in operations}
    for offset in range(0, bench.size_bytes, transfer_bytes):
        for operation, queue in queues.items():
            if len(queue) == depth:
                queue.popleft().wait()
            at = offset % BUFFER_BYTES
            part = bench.buffers[operation][at : at + transfer_bytes]
            call = bench.file.read if operation == READ else bench.file.write
            queue.append(call(bench.base(operation) + offset, part))
    for handle in itertools.chain(*queues.values()):
        handle.wait()


def measure(bench: Bench, *, transfer_bytes: int, repetitions: int) -> Iterator[Result]:
    """Yields read, write and both at once, each as the median of alternating repetitions."""
    size = bench.size_bytes
    cases: list[tuple[str, int, Callable[[int], None], tuple[int, ...]]] = [
        ("read", size, lambda threads: raw_loop(bench, READ, threads), (READ,)),
        ("write", size, lambda threads: raw_loop(bench, WRITE, threads), (WRITE,)),
        ("read and write", 2 * size, lambda threads: raw_both(bench, threads), (READ, WRITE)),
    ]
    for what, nbytes, raw, operations in cases:
        ours = partial(engine_loop, bench, operations, transfer_bytes)
        best = _best_thread_count(raw, ours)
        raw_seconds, our_seconds = _take_turns(partial(raw, best), ours, repetitions)
        rates = [nbytes / 1e9 / statistics.median(times) for times in (raw_seconds, our_seconds)]
        ratio = statistics.median(raw / ours for raw, ours in zip(raw_seconds, our_seconds, strict=True))
        yield Result(what, transfer_bytes, rates[0], best, rates[1], ratio)


def _take_turns(
    one: Callable[[], None], other: Callable[[], None], repetitions: int
) -> tuple[list[float], list[float]]:
    """Seconds of both in each repetition; they alternate in going first."""
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(repetitions):
        for times, work in [(seconds[0], one), (seconds[1], other)][:: -1 if turn % 2 else 1]:
            times.append(_seconds(work))
    return seconds


def _best_thread_count(raw: Callable[[int], None], ours: Callable[[], None]) -> int:
    times: dict[int, list[float]] = {threads: [] for threads in THREAD_COUNTS}
    for _ in range(3):
        for threads, seconds in times.items():
            seconds.append(_seconds(lambda threads=threads: raw(threads)))  # type: ignore[misc]
        ours()  # the engine finds its width meanwhile
    return min(times, key=lambda threads: statistics.median(times[threads]))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextlib.contextmanager
def opened(folder: Path, size_bytes: int) -> Iterator[Bench]:
    """An anonymous file of twice `size_bytes`, completely written once; nothing is left in the folder."""
    place.check_folder(folder)
    buffers = (host_buffer(BUFFER_BYTES), host_buffer(BUFFER_BYTES))
    for buffer in buffers:
        touch(buffer, 2)
    with DiskEngine() as engine:
        files = place.open_anonymous(folder, 2 * size_bytes)
        with DiskFile(engine, str(folder), files) as file:
            for offset in range(
                0, 2 * size_bytes, BUFFER_BYTES
            ):  # blocks that were never written would cost no reading
                file.write(offset, buffers[1]).wait()
            yield Bench(file, files.fd, size_bytes, buffers)


def disk(
    path: str | os.PathLike[str],
    *,
    size_bytes: int = 1 << 30,
    transfers: tuple[int, ...] = (16 << 20, 64 << 20),
    repetitions: int = 7,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Measures the engine on `path` against the raw loop, for every size of transfer; `tell` gets each result first."""
    step = max(BUFFER_BYTES, *transfers)
    with opened(Path(path), max(step, size_bytes // step * step)) as bench:
        results = []
        for size in transfers:
            for result in measure(bench, transfer_bytes=size, repetitions=repetitions):
                tell(result)
                results.append(result)
        return results


def show(results: list[Result], title: str) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("disk", "transfers", "raw loop", "its threads", "unbounded", "ratio"):
        table.add_column(column, justify="left" if column == "disk" else "right", no_wrap=True)
    for line in results:
        table.add_row(
            line.what,
            f"{line.transfer_bytes >> 20} MiB",
            f"{line.raw:.2f} GB/s",
            f"{line.raw_threads}+{line.raw_threads}" if "and" in line.what else str(line.raw_threads),
            f"{line.ours:.2f} GB/s",
            f"{line.ratio:.2f}",
        )
    Console().print(table)
