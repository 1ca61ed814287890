"""Predicted memory: what is gathered at a time, what buffers are filled, and the resident set of a whole process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import unbounded
from tests.planner.test_planning import Stack
from unbounded.machine.libraries import measure_libraries
from unbounded.planner.evaluation import Request, evaluate
from unbounded.planner.explanation import as_values, describe
from unbounded.planner.models.footprint import Footprint, StateBytes, UnitFootprint, expand, footprint_of
from unbounded.planner.models.shapes import Shape
from unbounded.planner.plan import Plan
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.search import search
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.logits import loss_bytes
from unbounded.planner.step.peaks import gathered_bytes
from unbounded.planning.running_step import predict_step
from unbounded.sharding.running import sharded
from unbounded.tiers.driver import resident_bytes

MIB = 2**20


def brute_force(footprint: Footprint, num_units: int) -> int:
    """The largest sum of so many neighbours in the order of the forward, and everything around them."""
    inner = [part.numel for part in footprint.parts for _ in range(part.count) if not part.is_outer]
    outer = sum(part.numel * part.count for part in footprint.parts if part.is_outer)
    return outer + max(sum(inner[start : start + num_units]) for start in range(len(inner)))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("sizes", [(1000, 10, 1000), (10, 1000, 30), (7, 7, 7)], ids=["ends", "blocks", "equal"])
def test_units_gathered_at_a_time_are_neighbours_and_those_around_them(
    prefetch: int, sizes: tuple[int, int, int]
) -> None:
    embedding, block, head = sizes
    parts = (
        UnitFootprint("embedding", embedding),
        UnitFootprint("blocks", block, count=9, is_block=True),
        UnitFootprint("head", head),
        UnitFootprint("root", 5, is_outer=True),
    )
    footprint = Footprint("a model", parts, hidden=1, states=StateBytes(weights=1))
    setup = Setup(prefetch_units=prefetch)
    assert gathered_bytes(footprint.parts, footprint.states, setup) == brute_force(footprint, prefetch + 2)
    split = [replace(part, numel=size, module=part.name) for part in expand(parts) for size in (part.numel - 3, 3)]
    assert gathered_bytes(split, footprint.states, setup) == brute_force(footprint, prefetch + 2)
    tiled = [replace(part, numel=min(part.numel, 20)) for part in parts]
    assert gathered_bytes(footprint.parts, footprint.states, replace(setup, tile_bytes=20)) == brute_force(
        replace(footprint, parts=tuple(tiled)), prefetch + 2
    )


def test_units_that_stay_on_the_device_are_not_gathered() -> None:
    footprint, setup = footprint_of(Shape("wide", 6, 64, 32000, 4, 4, 128)), Setup(tokens=64, sequence=16)

    def working(weights: tuple[tuple[str, str], ...]) -> float:
        request = Request(64, 16, plan=Plan(weights=weights, optimizer="host"))
        found = evaluate(footprint, UNMEASURED, setup, "exact", request)
        assert found is not None
        return found.prediction.held["device"]["working memory"]

    outside = [part for part in footprint.parts if not part.is_block]
    inside = [part for part in footprint.parts if part.is_block]
    left = gathered_bytes(inside, footprint.states, setup)
    whole = gathered_bytes(footprint.parts, footprint.states, setup)
    assert whole > 2 * left
    some = working((*((part.name, "device") for part in outside), ("*", "host")))
    assert working((("*", "host"),)) - some == pytest.approx(whole - left)


def test_a_loss_of_few_tokens_takes_what_the_gradient_of_the_head_does() -> None:
    shape = Shape("wide", 2, 64, 32000, 4, 4, 128)
    footprint, setup = footprint_of(shape), Setup(tokens=8)
    logits, head, hidden = 8 * 32000 * 2, 32000 * 64 * 2, 8 * 64 * 12
    assert loss_bytes(footprint, setup) == hidden + logits + 2 * head  # as it was made, and in its unit
    frozen = replace(footprint, parts=tuple(replace(part, trained_numel=0) for part in footprint.parts))
    assert loss_bytes(frozen, setup) == hidden + 8 * footprint.logits_bytes


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("plan", [{"optimizer": "disk"}, {"weights": "disk", "optimizer": "disk"}, {"weights": "host"}])
@pytest.mark.parametrize("depth", [2, 12])  # fewer pieces than are in flight, and more
def test_buffers_are_counted_as_far_as_updates_fill_them(plan: dict[str, str], depth: int, tmp_path: Path) -> None:
    width = 256
    model = Stack(depth, width)
    given = {"optimizer": "host", **plan, "disk_path": str(tmp_path)}
    placed, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), given)
    state = sharded(placed)
    predicted = predict_step(placed, tokens=2, sequence=1, machine=replace(UNMEASURED, is_cpu=True))
    assert predicted is not None
    assert state.optimizer is not None
    before = state.tiers.arena.used_bytes
    for _ in range(3):
        step(placed, optimizer, width)
    state.optimizer.updates.lanes.buffered.submit(lambda: None).wait()  # the last update is over
    pool = state.optimizer.updates._buffers
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    made = (state.tiers.arena.used_bytes - before - gradients) // pool.buffer_bytes
    piece = 4 * (width * width + width)
    sums = predicted.held["host"].get("buffers", 0.0) - made * piece
    assert 0 <= sums <= 0.01 * piece + depth * 4096  # checksums of pages
    unbounded.unshard(placed)


def test_a_process_holds_its_libraries_besides_what_budgets_count() -> None:
    footprint = footprint_of(Shape("small", 2, 64, 1000, 4, 4, 128))
    host = Request(4096, 64)
    machine = replace(UNMEASURED, process_bytes=300 * MIB)
    bare, whole = (search(footprint, each, host) for each in (UNMEASURED, machine))
    assert whole.prediction.held == bare.prediction.held
    assert whole.room == bare.room
    assert whole.prediction.resident_bytes == bare.prediction.resident_bytes + 300 * MIB
    assert "including 300.0 MiB of libraries" in "\n".join(describe(whole))
    assert "libraries" not in "\n".join(describe(bare))
    assert as_values(whole)["resident_bytes_per_rank"] == whole.prediction.resident_bytes
    on_cpu = replace(whole.prediction, machine=replace(machine, is_cpu=True))
    assert on_cpu.resident_bytes == on_cpu.tier_bytes("device") + on_cpu.tier_bytes("host") + 300 * MIB


def test_libraries_are_measured_in_a_process_of_their_own() -> None:
    ballast = torch.ones(512 * MIB, dtype=torch.uint8)
    found = measure_libraries()["process_bytes"]
    assert 64 * MIB < found < resident_bytes() - ballast.nbytes // 2
