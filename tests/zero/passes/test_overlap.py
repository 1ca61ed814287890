"""Overlap is real: lanes run during the computation, and a step without them takes longer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.ranks import HANG_SECONDS
from unbounded.observe import spans as spans_of
from unbounded.observe.report.lane_chart import draw_lanes
from unbounded.optim.rules import NativeRule
from unbounded.tiers import budget
from unbounded.tiers.array import DiskArray

BLOCK_SECONDS = 0.02  # of computation in each block, forward and backward, and of each read of the disk
DEPTH = 8


class Slow(torch.autograd.Function):
    """Takes a while in both directions, and leaves the cores to the lanes meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(BLOCK_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BLOCK_SECONDS)
        return gradient


class SlowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(Slow.apply(x)))


class SlowTransfer:
    """A transfer that is done at a fixed time, whoever waits for it and when."""

    def __init__(self, transfer: Any, done: float) -> None:
        self.transfer, self.done = transfer, done

    def wait(self) -> None:
        time.sleep(max(0.0, self.done - time.perf_counter()))
        self.transfer.wait()

    order_stream = wait


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read takes as long as a block's computation; any number of them may run at once."""
    plain_fetch = DiskArray.fetch
    monkeypatch.setattr(
        DiskArray,
        "fetch",
        lambda *arguments: SlowTransfer(plain_fetch(*arguments), time.perf_counter() + BLOCK_SECONDS),
    )


def narrow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads come one at a time, and so do writes: all of a step take about as long as its computation."""
    for name in ("fetch", "evict"):
        monkeypatch.setattr(DiskArray, name, _in_turn(getattr(DiskArray, name)))


def _in_turn(move: Any) -> Any:
    free_at = 0.0

    def slow_move(*arguments: Any) -> SlowTransfer:
        nonlocal free_at
        free_at = max(free_at, time.perf_counter()) + BLOCK_SECONDS / 4
        return SlowTransfer(move(*arguments), free_at)

    return slow_move


def step_seconds(folder: Path, trace_path: Path | None = None, depth: int = DEPTH) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*[SlowBlock() for _ in range(depth)])
    plan = {"weights": "disk", "optimizer": "disk", "disk_path": str(folder)}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)

    def step() -> None:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # records the order
    step()
    optimizer.wait()
    start = time.perf_counter()
    if trace_path is not None:
        with unbounded.trace(trace_path):
            step()
            step()
            optimizer.wait()
    else:
        step()
        step()
        optimizer.wait()
    return time.perf_counter() - start


def test_a_step_with_lanes_is_faster_than_the_same_step_in_series(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_disk(monkeypatch)
    overlapped, in_series = [], []
    # Series: a block's two computations, two reads of its weights, one wait for its states, all added up.
    # Overlapped, weights are read while the blocks before run, and states during the next forward.
    for _ in range(5):  # what else the machine does may come in the way of either
        monkeypatch.setenv("UNBOUNDED_OVERLAP", "1")
        overlapped.append(step_seconds(tmp_path))
        monkeypatch.setenv("UNBOUNDED_OVERLAP", "0")
        in_series.append(step_seconds(tmp_path))
        if min(overlapped) < 0.85 * min(in_series):
            return
    raise AssertionError(f"{overlapped} s with lanes, {in_series} s in series")


@pytest.mark.parametrize(
    ("device", "weights"),
    [("cpu", "host"), *[pytest.param("cuda", weights, marks=pytest.mark.gpu) for weights in ("host", "device")]],
)
def test_a_forward_waits_for_new_weights_and_not_for_states_on_their_way_to_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, weights: str
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(device)
    plan = {"weights": weights, "gradients": "host", "optimizer": "disk", "disk_path": str(tmp_path)}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    may_write, plain_evict = threading.Event(), DiskArray.evict

    class HeldWrite:
        def __init__(self, write: Any) -> None:
            self.write = write

        def wait(self) -> None:
            assert may_write.wait(HANG_SECONDS)
            self.write.wait()

    monkeypatch.setattr(DiskArray, "evict", lambda *arguments: HeldWrite(plain_evict(*arguments)))
    model(torch.randn(4, 64, device=device)).square().mean().backward()
    optimizer.step()
    model(torch.randn(4, 64, device=device))
    (unit,) = [unit for unit in optimizer.engine.units if unit.weights_ready is not None]
    assert not unit.states_written.launched()
    may_write.set()
    optimizer.wait()
    assert unit.states_written.launched()


def test_states_on_disk_are_read_while_states_in_memory_are_updated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = nn.Sequential(*[SlowBlock() for _ in range(DEPTH)])
    optimizer = torch.optim.AdamW(model.parameters())
    plan = {
        "weights": "host",
        "gradients": "host",
        "optimizer": ((str(DEPTH - 1), "disk"), ("*", "host")),
        "disk_path": str(tmp_path),
    }
    model, optimizer = unbounded.shard(model, optimizer, plan)
    reading, plain_fetch, plain_apply = threading.Event(), DiskArray.fetch, NativeRule.apply

    def fetch(*arguments: Any) -> Any:
        reading.set()
        return plain_fetch(*arguments)

    def apply(*arguments: Any, **named: Any) -> Any:
        assert reading.wait(HANG_SECONDS)  # the last unit's, while the first is updated
        return plain_apply(*arguments, **named)

    monkeypatch.setattr(DiskArray, "fetch", fetch)
    monkeypatch.setattr(NativeRule, "apply", apply)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.wait()
    assert [unit.states["exp_avg"].tier for unit in optimizer.engine.units].count("disk") == 1


@pytest.mark.parametrize("overlap", ["1", "0"])
def test_a_trace_shows_compute_beside_every_transfer_lane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlap: str
) -> None:
    monkeypatch.setenv("UNBOUNDED_OVERLAP", overlap)
    narrow_disk(monkeypatch)
    path = tmp_path / "step.trace.json"
    step_seconds(tmp_path, path, depth=5 * budget.DEPTH)  # far more units than are in flight at once
    spans = spans_of.read_spans(path)
    busy = {use.lane: use.busy_seconds for use in spans_of.lane_uses(spans)}
    assert "host optimizer" in busy
    for lane in ("disk read", "disk write"):
        together = spans_of.at_once([span for span in spans if span.lane in ("compute", lane)])
        assert (together.get(2, 0) / busy[lane] > 0.03) == (overlap == "1"), (lane, together, busy)
    assert draw_lanes(spans).count("<rect") > DEPTH
