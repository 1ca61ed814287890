"""What the lanes did and when: the calls that the engine marks its work with, and the recorder that keeps it.

    with span(DISK_READ, "block 3", bytes=n):  ...      # work of this thread
    with device_span(COMPUTE, "block 3"):      ...      # work put on a CUDA stream; on CPU the same as span
    record(DISK_READ, "block 3", start_ns, end_ns, n)   # work timed elsewhere, with the monotonic clock

Totals per lane are always kept (`lane_totals`). Single spans are kept only between `start` and `stop`, or inside
`trace(path)`, which writes them to a file. Work on CUDA streams is timed by events, and only while a trace is being
recorded or after `time_device(True)`: until then a device span counts its bytes and nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from unbounded.errors import StateError
from unbounded.launcher import read_numbers
from unbounded.observe.device import DeviceClock
from unbounded.observe.lanes import MARKS, LaneTotal, Totals
from unbounded.observe.perfetto import BEGINNING, SpanRecord, write
from unbounded.observe.replacing import check_replaceable

_MAX_SPANS = 2_000_000  # about 400 MB of file; later spans are counted as dropped

_totals = Totals()
_recorder: Recorder | None = None
_times_device = False


class Recorder:
    """Keeps spans from its construction until `finish`, which writes them to `path`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path(path)
        self.origin_ns = time.perf_counter_ns()
        self.epoch_ns = time.time_ns()
        self.spans: list[SpanRecord] = []
        self.num_dropped = 0

    def append(self, span: SpanRecord) -> None:
        """Keep one span; a list's append needs no lock."""
        if len(self.spans) < _MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_dropped += 1

    def finish(self) -> Path:
        """Write the file and return its path."""
        write(
            self.path,
            self.spans,
            origin_ns=self.origin_ns,
            epoch_ns=self.epoch_ns,
            rank=_rank(),
            num_dropped=self.num_dropped,
        )
        return self.path


def record(lane: str, name: str, start_ns: int, end_ns: int, bytes: int = 0) -> None:
    """Count and, while recording, keep one span timed by the caller with `time.perf_counter_ns` (CLOCK_MONOTONIC)."""
    if lane not in MARKS:
        _totals.add(lane, start_ns, end_ns, bytes)
    recorder = _recorder
    if recorder is not None and end_ns >= recorder.origin_ns:
        recorder.append(SpanRecord(lane, name, start_ns, end_ns, bytes))


_clock = DeviceClock(record)


class span(AbstractContextManager[None]):
    """Mark work that this thread does inside the `with`."""

    __slots__ = ("_bytes", "_lane", "_name", "_start_ns")

    def __init__(self, lane: str, name: str, bytes: int = 0) -> None:
        self._lane, self._name, self._bytes = lane, name, bytes

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        record(self._lane, self._name, self._start_ns, time.perf_counter_ns(), self._bytes)


class _DeviceSpan(AbstractContextManager[None]):
    __slots__ = ("_bytes", "_lane", "_name", "_start", "_stream")

    def __init__(self, lane: str, name: str, stream: Any, num_bytes: int) -> None:
        self._lane, self._name, self._stream, self._bytes = lane, name, stream, num_bytes

    def __enter__(self) -> None:
        self._start = _clock.begin(self._stream)

    def __exit__(self, *_: object) -> None:
        _clock.end(self._lane, self._name, self._bytes, self._stream, self._start)


class _Untimed(AbstractContextManager[None]):
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_UNTIMED = _Untimed()
_has_device = False


def device_span(lane: str, name: str, stream: Any = None, bytes: int = 0) -> AbstractContextManager[None]:
    """Mark work that is put on `stream` (the current CUDA stream if None) inside the `with`; on CPU, as `span`."""
    if stream is None and not (_has_device or _find_device()):
        return span(lane, name, bytes)
    if _recorder is None and not _times_device:
        _totals.count(lane, bytes)
        return _UNTIMED
    return _DeviceSpan(lane, name, stream if stream is not None else sys.modules["torch"].cuda.current_stream(), bytes)


def _find_device() -> bool:
    """Whether CUDA is in use. Once it is, it stays so in this process, and the hot path does not ask again."""
    global _has_device
    torch = sys.modules.get("torch")
    _has_device = torch is not None and torch.cuda.is_initialized()
    return _has_device


def _forget_device() -> None:
    global _has_device
    _has_device = False


os.register_at_fork(after_in_child=_forget_device)


def mark(kind: str, name: str) -> AbstractContextManager[None]:
    """Mark a whole step or pass (`STEP`, `PASS`) inside the `with`; costs nothing while no trace is recorded."""
    return _UNTIMED if _recorder is None else device_span(kind, name)


def time_device(enabled: bool) -> None:
    """Say whether device spans are timed for `lane_totals` while no trace is recorded: two CUDA events per span."""
    global _times_device
    _times_device = enabled


def lane_totals() -> dict[str, LaneTotal]:
    """Busy seconds, bytes and spans of every lane since the process began. Subtract two readings for a period.

    Never waits: device spans still running are counted by a later call.
    """
    _clock.drain()
    return _totals.read()


def start(path: str | os.PathLike[str]) -> None:
    """Begin recording to `path` (under several ranks, one file per rank: `name.rank1.json`)."""
    global _recorder
    if _recorder is not None:
        raise StateError(f'a trace is already being recorded to "{_recorder.path}". Stop that one first.')
    _clock.drain(wait=True)
    _recorder = Recorder(path)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Where this rank would write a trace for `path`; raises if a trace must not go there."""
    return check_replaceable(_path_of_rank(Path(path)), "the trace", BEGINNING.encode())


def is_recording() -> bool:
    """Whether a trace is being recorded."""
    return _recorder is not None


def stop() -> Path:
    """Wait for unfinished device spans, write the file and return its path."""
    global _recorder
    if _recorder is None:
        raise StateError("no trace is being recorded. Call start(path) first.")
    _clock.drain(wait=True)
    recorder, _recorder = _recorder, None
    return recorder.finish()


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the lanes inside the `with` as a file for ui.perfetto.dev; it is also written when the body raises."""
    start(path)
    try:
        yield
    finally:
        stop()


def _rank() -> int:
    return _distributed()[0]


def _distributed() -> tuple[int, int]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    numbers = read_numbers(os.environ)
    return numbers.rank, numbers.size


def _path_of_rank(path: Path) -> Path:
    rank, world_size = _distributed()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if world_size > 1 else path
