"""The lanes of a training step, and how long each has been busy.

A lane is one kind of work that can run at the same time as the others. The totals are always kept, with or without
a trace file: one addition per span. Times are `time.perf_counter_ns`, the monotonic clock that native threads read too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from unbounded.process import module_lock

DISK_READ = "disk read"
DISK_WRITE = "disk write"
HOST_TO_DEVICE = "host-to-device"
DEVICE_TO_HOST = "device-to-host"
GATHER = "gather"
REDUCE = "reduce"
COMPUTE = "compute"
HOST_OPTIMIZER = "host optimizer"

STEP, PASS = "step", "pass"
MARKS = (STEP, PASS)
"""Not lanes: spans of whole steps, and of their forward and backward passes. They are kept in traces, not counted."""

LANES = (COMPUTE, GATHER, REDUCE, HOST_TO_DEVICE, DEVICE_TO_HOST, HOST_OPTIMIZER, DISK_READ, DISK_WRITE)


@dataclass(frozen=True)
class LaneTotal:
    """What one lane did: seconds in which at least one of its spans ran, bytes moved, spans counted."""

    busy_seconds: float = 0.0
    bytes: int = 0
    count: int = 0

    def __sub__(self, before: LaneTotal) -> LaneTotal:
        return LaneTotal(self.busy_seconds - before.busy_seconds, self.bytes - before.bytes, self.count - before.count)


class Totals:
    """Running totals of all lanes, safe to add to from any thread.

    Spans that overlap within a lane are counted once: only the part of a span after the last end seen so far is
    added. That is exact if spans end in the order they began, as transfers in a queue do.
    """

    def __init__(self) -> None:
        self._lock = module_lock()
        self._lanes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # busy, bytes, count, last end

    def add(self, lane: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """Count one finished span."""
        with self._lock:
            entry = self._lanes[lane]
            busy_until = entry[3]
            if end_ns > busy_until:
                entry[0] += end_ns - max(start_ns, busy_until)
                entry[3] = end_ns
            entry[1] += num_bytes
            entry[2] += 1

    def count(self, lane: str, num_bytes: int) -> None:
        """Count a span whose time is not measured."""
        with self._lock:
            entry = self._lanes[lane]
            entry[1] += num_bytes
            entry[2] += 1

    def read(self) -> dict[str, LaneTotal]:
        """The totals now, one entry for each known lane and for any other that was used."""
        with self._lock:
            seen = {lane: LaneTotal(entry[0] / 1e9, entry[1], entry[2]) for lane, entry in self._lanes.items()}
        return {lane: seen.get(lane, LaneTotal()) for lane in (*LANES, *(name for name in seen if name not in LANES))}
