"""Spans of work on a CUDA stream: pairs of events, resolved to the host's clock after they have happened.

Nothing here makes the host wait while training: events come from a pool, are recorded on the caller's stream and read
once they are done. A reference event per device ties its clock to the host's. It is renewed from time to time, because
`elapsed_time` is a 32-bit float that gets coarser with the distance.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

_RENEW_NS = 10_000_000_000  # 10 s: elapsed_time then resolves about a microsecond


class _OpenSpan(NamedTuple):
    lane: str
    name: str
    num_bytes: int
    device: int
    start: Any
    end: Any


class _Reference(NamedTuple):
    event: Any
    host_ns: int


class DeviceClock:
    """Measures device spans and hands each, once it has happened, to `sink(lane, name, start_ns, end_ns, bytes)`."""

    def __init__(self, sink: Callable[[str, str, int, int, int], None]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._pool: dict[int, list[Any]] = {}
        self._references: dict[int, _Reference] = {}
        self._pending: deque[_OpenSpan] = deque()

    def begin(self, stream: Any) -> Any:
        """Record the start of a span on `stream` (a torch.cuda.Stream)."""
        with self._lock:
            if stream.device_index not in self._references:
                self._references[stream.device_index] = self._anchor(stream.device_index)
        return self._record(stream)

    def end(self, lane: str, name: str, num_bytes: int, stream: Any, start: Any) -> None:
        """Record the end of the span that `begin` returned `start` for."""
        pending = _OpenSpan(lane, name, num_bytes, stream.device_index, start, self._record(stream))
        with self._lock:
            self._pending.append(pending)
            crowded = len(self._pending) > 4096
        if crowded:
            self.drain()

    def drain(self, *, wait: bool = False) -> None:
        """Resolve the spans that have happened; with `wait`, all of them."""
        done: list[_OpenSpan] = []
        with self._lock:
            for _ in range(len(self._pending)):
                pending = self._pending.popleft()
                if wait:
                    pending.end.synchronize()
                if wait or pending.end.query():
                    done.append(pending)
                else:
                    self._pending.append(pending)
            resolved = [self._resolve(pending) for pending in done]
        for pending, (start_ns, end_ns) in zip(done, resolved, strict=True):
            self._sink(pending.lane, pending.name, start_ns, end_ns, pending.num_bytes)

    def _resolve(self, pending: _OpenSpan) -> tuple[int, int]:
        reference = self._references[pending.device]
        start_ns = reference.host_ns + int(reference.event.elapsed_time(pending.start) * 1e6)
        end_ns = start_ns + int(pending.start.elapsed_time(pending.end) * 1e6)
        if start_ns - reference.host_ns > _RENEW_NS:
            self._references[pending.device] = _Reference(pending.start, start_ns)
            self._pool[pending.device].append(pending.end)
        else:
            self._pool[pending.device] += (pending.start, pending.end)
        return start_ns, end_ns

    def _record(self, stream: Any) -> Any:
        import torch

        pool = self._pool.setdefault(stream.device_index, [])
        try:
            event = pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _anchor(self, device: int) -> _Reference:
        import torch

        with torch.cuda.device(device):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.Stream(device))  # an idle stream: the event happens now, not after queued work
            event.synchronize()
        return _Reference(event, time.perf_counter_ns())
