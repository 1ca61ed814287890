"""Lanes: totals that are always there, and traces that a viewer can open."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from unbounded.errors import StateError
from unbounded.observe import trace as lanes
from unbounded.observe.lanes import COMPUTE, DISK_READ, GATHER, LANES, LaneTotal, Totals
from unbounded.observe.perfetto import SpanRecord, layout

NAMES = ("block 1", "block 2", "before", "inside", "after", "work", "launch", "matmul", "wait")


def read_spans(path: Path) -> list[dict[str, Any]]:
    """Those of this module: lanes of a test before it may still have work of their own to record."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["name"] in NAMES]


def test_every_lane_has_a_track_named_after_it(tmp_path: Path) -> None:
    with lanes.trace(tmp_path / "t.json"):
        lanes.record(DISK_READ, "block 1", *[lanes.time.perf_counter_ns()] * 2)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == list(LANES)


def test_a_span_is_written_with_its_name_lane_length_and_bytes(tmp_path: Path) -> None:
    lanes.start(tmp_path / "t.json")
    origin = lanes.time.perf_counter_ns()
    lanes.record(GATHER, "block 2", origin + 1_000, origin + 3_500, bytes=64)
    assert lanes.stop() == tmp_path / "t.json"
    (event,) = read_spans(tmp_path / "t.json")
    assert (event["name"], event["cat"], event["args"]) == ("block 2", GATHER, {"bytes": 64})
    assert event["dur"] == pytest.approx(2.5)


def test_nothing_is_kept_outside_a_trace_but_totals_are(tmp_path: Path) -> None:
    before = lanes.lane_totals()[COMPUTE]
    with lanes.span(COMPUTE, "before", bytes=3):
        pass
    with lanes.trace(tmp_path / "t.json"), lanes.device_span(COMPUTE, "inside", bytes=4):
        pass
    with lanes.span(COMPUTE, "after", bytes=5):
        pass
    assert [event["name"] for event in read_spans(tmp_path / "t.json")] == ["inside"]
    done = lanes.lane_totals()[COMPUTE] - before
    assert (done.bytes, done.count) == (12, 3)
    assert done.busy_seconds > 0


def test_overlapping_spans_of_a_lane_count_once_in_its_busy_time() -> None:
    totals = Totals()
    totals.add(DISK_READ, 0, 4_000_000_000, 1)
    totals.add(DISK_READ, 1_000_000_000, 5_000_000_000, 2)
    totals.add(DISK_READ, 7_000_000_000, 8_000_000_000, 4)
    assert totals.read()[DISK_READ] == LaneTotal(6.0, 7, 3)


def test_spans_that_overlap_get_rows_of_their_own() -> None:
    first, second, third = (SpanRecord(DISK_READ, str(i), *times) for i, times in enumerate([(0, 4), (1, 5), (4, 6)]))
    assert layout([third, second, first]) == [(first, 0), (second, 1), (third, 0)]


def test_threads_add_up_without_losing_a_span() -> None:
    totals = Totals()
    workers = [threading.Thread(target=lambda: [totals.add(GATHER, 0, 1, 1) for _ in range(2000)]) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert totals.read()[GATHER].count == 8000


def test_the_file_is_written_also_when_the_body_raises(tmp_path: Path) -> None:
    def work() -> None:
        with lanes.trace(tmp_path / "t.json"), lanes.span(COMPUTE, "work"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert len(read_spans(tmp_path / "t.json")) == 1


def test_a_second_trace_at_once_is_refused_with_the_first_ones_path(tmp_path: Path) -> None:
    with lanes.trace(tmp_path / "t.json"), pytest.raises(StateError, match=r"already being recorded to .*t\.json"):
        lanes.start(tmp_path / "u.json")
    with pytest.raises(StateError, match="no trace is being recorded"):
        lanes.stop()


def test_ranks_write_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with lanes.trace(tmp_path / "t.json"):
        pass
    assert json.loads((tmp_path / "t.rank1.json").read_text())["otherData"]["rank"] == 1


def test_importing_the_lanes_does_not_import_torch() -> None:
    code = "import sys, unbounded.observe.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_device_spans_are_timed_by_the_stream_and_lie_on_the_hosts_clock(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with lanes.trace(tmp_path / "t.json"):
        with lanes.span("host", "launch"), lanes.device_span(COMPUTE, "matmul"):
            for _ in range(20):
                x = x @ x / 64
        with lanes.span("host", "wait"):
            torch.cuda.synchronize()
    spans = {event["name"]: event for event in read_spans(tmp_path / "t.json")}
    matmul, wait = spans["matmul"], spans["wait"]
    assert matmul["dur"] > spans["launch"]["dur"]  # asynchronous: the work outlives its launch
    assert matmul["ts"] + matmul["dur"] == pytest.approx(wait["ts"] + wait["dur"], abs=0.2 * matmul["dur"])
