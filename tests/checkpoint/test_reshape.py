"""A checkpoint loads under any number of ranks, stage, tier and state format."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.chains import run_chain
from tests.checkpoint.jobs import OPTIMIZERS, assert_same, build, train, whole
from unbounded.checkpoint.format.manifest import TensorEntry
from unbounded.checkpoint.format.slices import GRAIN, BlockRange, FileRun, RunMap, Slice, deal, find_runs, plan_blocks

PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]


def make(rank: int, world_size: int, folder: str, plan: dict[str, Any]) -> None:
    model, optimizer = build(plan)
    train(model, optimizer, 0, 2, rank)
    unbounded.save(folder, model, optimizer, mark="made")


def pass_on(rank: int, world_size: int, source: str, target: str, plan: dict[str, Any]) -> list[int]:
    """Loads one checkpoint and saves another from it."""
    model, optimizer = build(plan, seed=99)
    assert unbounded.load(source, model, optimizer) == {"mark": "made"}
    unbounded.save(target, model, optimizer, mark="made")
    from unbounded.sharding.running import sharded

    return sorted({step for unit in sharded(model).engine.units if unit.trainable for step in unit.steps})


LAYOUTS = [
    (1, {"stage": 3}),
    (2, {"stage": 3, "weights": "disk", "optimizer": "disk"}),
    (4, {"stage": 3, "weights": "host", "optimizer": "host"}),
    (2, {"stage": 0}),
    (4, {"stage": 1, "optimizer": "disk"}),
    (2, {"stage": 2, "optimizer": "host"}),
    (1, {"stage": 3, "weights": "disk", "optimizer": "disk"}),
    (4, {"stage": 3, "weights": "disk", "optimizer": "disk", "unit_numel": None}),
]


@pytest.mark.parametrize("kind", ["exact", "compact"])
def test_states_pass_bit_for_bit_through_ranks_stages_units_and_tiers(ranks: Any, tmp_path: Path, kind: str) -> None:
    base = {"precision": "bf16", "optimizer_format": kind}
    ranks(2, make, str(tmp_path / "first"), base)
    first, before = whole(tmp_path / "first"), tmp_path / "first"
    assert {"weight", "remainder", "exp_avg", "exp_avg_sq", "buffer"} <= {key[0] for key in first}
    for number, (world_size, plan) in enumerate(LAYOUTS):
        target = tmp_path / f"layout{number}"
        steps = ranks(world_size, pass_on, str(before), str(target), {**base, **plan})
        assert steps == [[2]] * world_size
        assert_same(whole(target), first)
        before = target


class Tiny(nn.Module):
    """All of it is in one block of a file, and three ranks pad its units by more than two do."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(5) for _ in range(7))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum() * sum(scale.sum() for scale in self.scales)


def pass_tiny(rank: int, world_size: int, source: str | None, target: str) -> None:
    model = Tiny()
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"stage": 0})
    if source is None:
        model(torch.ones(2, 7)).backward()
        optimizer.step()
    else:
        unbounded.load(source, model, optimizer)
    unbounded.save(target, model, optimizer)


def test_what_is_padding_of_one_array_stays_what_it_is_in_another(ranks: Any, tmp_path: Path) -> None:
    ranks(2, pass_tiny, None, str(tmp_path / "two"))
    ranks(3, pass_tiny, str(tmp_path / "two"), str(tmp_path / "three"))
    assert_same(whole(tmp_path / "three"), whole(tmp_path / "two"))


@pytest.mark.parametrize("seed", [0, 34, 54])  # more of them: python -m tests.checkpoint.chains FIRST LAST
def test_random_models_pass_bit_for_bit_through_random_layouts(seed: int, tmp_path: Path) -> None:
    assert len(run_chain(seed, tmp_path)) > 1


def test_exact_states_become_fp32_masters_and_back_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    ranks(2, make, str(tmp_path / "exact"), {"precision": "bf16"})
    exact = whole(tmp_path / "exact")
    before = "exact"
    for precision, world_size in (("fp32", 1), ("bf16", 4), ("fp16", 2), ("bf16", 1)):
        target = f"{precision}-{world_size}"
        ranks(world_size, pass_on, str(tmp_path / before), str(tmp_path / target), {"precision": precision})
        held = whole(tmp_path / target)
        for (kind, name), remainder in exact.items():
            if kind != "remainder":
                continue
            bits = (exact["weight", name].view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
            if precision == "fp32":
                assert torch.equal(held["weight", name].view(torch.int32), bits)
            elif precision == "fp16":
                assert torch.equal(held["master", name].view(torch.int32), bits)
            else:
                assert torch.equal(held["remainder", name], remainder)
            assert torch.equal(held["exp_avg", name], exact["exp_avg", name])
        before = target
    states = {key: value for key, value in exact.items() if key[1].split(".")[0] != "frozen"}
    # Frozen weights have no master: only what fp16 cannot hold of a bf16 value is lost on the way.
    assert_same({key: value for key, value in held.items() if key in states}, states)


def test_compact_states_come_near_the_exact_ones(ranks: Any, tmp_path: Path) -> None:
    ranks(1, make, str(tmp_path / "exact"), {"precision": "fp32"})
    ranks(2, pass_on, str(tmp_path / "exact"), str(tmp_path / "compact"), {
        "precision": "bf16", "optimizer_format": "compact"
    })  # fmt: skip
    ranks(1, pass_on, str(tmp_path / "compact"), str(tmp_path / "back"), {"precision": "fp32"})
    exact, back = whole(tmp_path / "exact"), whole(tmp_path / "back")
    for key, value in exact.items():
        if key[0] in ("weight", "exp_avg") and not key[1].startswith("frozen"):
            error = (back[key] - value).norm() / value.norm().clamp_min(1e-12)
            assert error < (1e-4 if key[0] == "weight" else 5e-2), key


def in_dtypes(rank: int, world_size: int, folder: str, optimizer: str) -> list[float]:
    """Losses of a model in fp32, and of one in fp64 and one in fp32 that were loaded, each from the one before."""
    losses = []
    for number, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        model = nn.Linear(5, 3).to(dtype)
        model, sharded = unbounded.shard(model, OPTIMIZERS[optimizer](model.parameters()), {})
        inputs = torch.linspace(-1, 1, 20, dtype=dtype).view(4, 5)

        def train(model: nn.Module = model, sharded: Any = sharded, inputs: torch.Tensor = inputs) -> float:
            loss = model(inputs).square().sum()
            loss.backward()
            sharded.step()
            sharded.zero_grad()
            return float(loss)

        if number:
            unbounded.load(f"{folder}/{number - 1}", model, sharded)
        else:
            train()
        unbounded.save(f"{folder}/{number}", model, sharded)
        train()
        losses.append(train())
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_states_in_fp32_load_into_a_model_in_fp64_and_back(ranks: Any, tmp_path: Path, optimizer: str) -> None:
    for first, second, third in ranks(1, in_dtypes, str(tmp_path), optimizer):
        assert second == pytest.approx(first, rel=1e-5)
        assert third == pytest.approx(first, rel=1e-5)


def straight_through(rank: int, world_size: int, source: str, target: str, plan: dict[str, Any]) -> list[int]:
    """Without staging, as a large checkpoint is loaded."""
    from unbounded.checkpoint import loading

    loading.STAGED_BYTES, before = 0, loading.STAGED_BYTES
    try:
        return pass_on(rank, world_size, source, target, plan)
    finally:
        loading.STAGED_BYTES = before


def test_a_checkpoint_too_large_to_stage_is_read_straight_into_place(ranks: Any, tmp_path: Path) -> None:
    ranks(2, make, str(tmp_path / "first"), {"precision": "bf16"})
    for number, (world_size, plan) in enumerate(LAYOUTS[:3]):
        target = tmp_path / str(number)
        ranks(world_size, straight_through, str(tmp_path / "first"), str(target), {"precision": "bf16", **plan})
        assert_same(whole(target), whole(tmp_path / "first"))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_a_box_of_any_rank_is_found_element_by_element() -> None:
    generator = random.Random(0)
    for _ in range(200):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 4)))
        box = tuple(tuple(sorted(generator.sample(range(size + 1), 2))) for size in shape)
        values = torch.arange(torch.Size(shape).numel()).reshape(shape)
        stored = values[tuple(slice(*side) for side in box)].reshape(-1)
        piece = Slice(0, 100, stored.numel() * 8, box)  # type: ignore[arg-type]
        for run in find_runs(piece, shape, 8):
            position = (run.offset - 100) // 8
            assert stored[position : position + run.stop - run.start].tolist() == list(range(run.start, run.stop))
        assert sum(run.stop - run.start for run in find_runs(piece, shape, 8)) == stored.numel()


def test_boxes_of_tensor_parallel_shards_cover_a_matrix() -> None:
    left, right = Slice(0, 0, 24, ((0, 3), (0, 2))), Slice(1, 8, 36, ((0, 3), (2, 5)))
    runs = RunMap([left, right], (3, 5), 4)
    assert runs.first_gap() is None
    assert runs.covering(1, 8) == [FileRun(1, 2, 0, 4), FileRun(2, 5, 1, 8), FileRun(5, 7, 0, 8), FileRun(7, 8, 1, 20)]
    assert RunMap([left], (3, 5), 4).first_gap() == 2
    entry = TensorEntry("w", "weight", (3, 5), torch.float32, (left, right))
    assert entry.runs.covering(0, 15) == runs.covering(0, 15)


def test_ranks_that_all_hold_everything_write_every_element_once() -> None:
    for size in (1, 2, 3, 8):
        for numel in (1, 128, GRAIN, GRAIN + 128, 5 * GRAIN, 100 * GRAIN + 256):
            parts = sorted(deal(numel, 3, rank, size) for rank in range(size))
            held = [part for part in parts if part[0] < part[1]]
            assert held[0][0] == 0
            assert held[-1][1] == numel
            assert all(one[1] == other[0] for one, other in itertools.pairwise(held))
            assert max(stop - start for start, stop in held) <= -(-numel // size) + GRAIN


def test_reads_are_whole_blocks_joined_across_small_gaps() -> None:
    edges = [0, 100, 200, 250, 350, 405]
    assert plan_blocks([(5, 20), (130, 140)], edges, 100) == [BlockRange(0, 200)]
    assert plan_blocks([(260, 270), (5, 20)], edges, 100) == [BlockRange(0, 100), BlockRange(250, 350)]
    assert plan_blocks([(249, 251), (404, 405)], edges, 0) == [BlockRange(200, 405)]
    assert plan_blocks([(100, 200)], edges, 0) == [BlockRange(100, 200)]
