"""The disk of a folder, measured through the engine that states go through: read, write, and both at once."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from unbounded.native.disk import DiskEngine, DiskFile, DiskHandle, place
from unbounded.native.host_memory import host_buffer, touch

TRANSFER_BYTES, IN_FLIGHT = 16 << 20, 6
FILE_BYTES = 1 << 30
SECONDS = 2.0  # at most, of each of the three


def measure_disk(folder: Path) -> dict[str, float]:
    """Rates in bytes per second; `disk_both` is the sum of both directions. Takes a file of 1 GiB meanwhile."""
    place.check_folder(folder)
    size = min(FILE_BYTES, max(4 * TRANSFER_BYTES, place.free_bytes(folder) // 8 // TRANSFER_BYTES * TRANSFER_BYTES))
    buffers = (host_buffer(IN_FLIGHT * TRANSFER_BYTES), host_buffer(IN_FLIGHT * TRANSFER_BYTES))
    for buffer in buffers:
        touch(buffer, 2)
    with DiskEngine() as engine:
        files = place.open_anonymous(folder, 2 * size)
        with DiskFile(engine, str(folder), files) as file:
            _move(file, size, 2 * size, buffers, ("write",))  # blocks that were never written would cost no reading
            return {
                "disk_write": _move(file, 0, size, buffers, ("write",)),
                "disk_read": _move(file, 0, size, buffers, ("read",)),
                "disk_both": _move(file, 0, size, buffers, ("read", "write")),
            }


def _move(file: DiskFile, start: int, stop: int, buffers: tuple, ways: tuple[str, ...]) -> float:  # type: ignore[type-arg]
    """Moves [start, stop) in transfers with several in flight, for `SECONDS` at most; bytes per second in sum.

    What is read lies in one half of the file and what is written in the other.
    """
    half = stop - start
    queues: dict[str, deque[DiskHandle]] = {way: deque() for way in ways}
    began, moved = time.perf_counter(), 0
    for number, offset in enumerate(range(start, stop, TRANSFER_BYTES)):
        for index, (way, queue) in enumerate(queues.items()):
            if len(queue) == IN_FLIGHT:
                queue.popleft().wait()
            at = number % IN_FLIGHT * TRANSFER_BYTES
            part = buffers[index][at : at + TRANSFER_BYTES]
            place_at = offset + half if index else offset
            queue.append(file.read(place_at, part) if way == "read" else file.write(place_at, part))
            moved += TRANSFER_BYTES
        if time.perf_counter() - began > SECONDS:
            break
    for queue in queues.values():
        while queue:
            queue.popleft().wait()
    return moved / (time.perf_counter() - began)
