"""Training that was saved and loaded goes on bit for bit as if it had never stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import unbounded
from tests.checkpoint.jobs import Odd, assert_same, backward, build, step, train, whole

PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]
FORMATS = [("fp32", "exact"), ("bf16", "exact"), ("bf16", "compact"), ("fp16", "exact"), ("fp16", "compact")]


def interrupted(rank: int, world_size: int, folder: str, plans: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """For every plan: the losses after a save, and those of another model that loaded it."""
    results = []
    for number, plan in enumerate(plans):
        model, optimizer = build(plan)
        train(model, optimizer, 0, 2, rank)
        unbounded.save(f"{folder}/{number}", model, optimizer)
        expected = train(model, optimizer, 2, 5, rank)
        model, optimizer = build(plan, seed=99)
        train(model, optimizer, 7, 8, rank)
        unbounded.load(f"{folder}/{number}", model, optimizer)
        results.append((expected, train(model, optimizer, 2, 5, rank)))
    return results


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_bit_for_bit_on_every_tier_and_in_every_format(
    ranks: Any, tmp_path: Path, world_size: int, tier: str
) -> None:
    plans = [
        {"precision": precision, "optimizer_format": kind, "weights": tier, "optimizer": tier, "gradients": "host"}
        for precision, kind in FORMATS
    ]
    for results in ranks(world_size, interrupted, str(tmp_path), plans):
        for plan, (expected, resumed) in zip(plans, results, strict=True):
            assert resumed == expected, plan


def test_training_goes_on_bit_for_bit_in_every_stage_over_four_ranks(ranks: Any, tmp_path: Path) -> None:
    plans = [{"stage": stage, "precision": "bf16"} for stage in (0, 1, 2, 3)]
    for results in ranks(4, interrupted, str(tmp_path), plans):
        for expected, resumed in results:
            assert resumed == expected


def with_optimizer(rank: int, world_size: int, folder: str, kind: str) -> tuple[list[float], list[float]]:
    model, optimizer = build({}, optimizer=kind)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    for index in range(2):
        step(model, optimizer, index, rank)
        schedule.step()
    unbounded.save(folder, model, optimizer, schedule=schedule.state_dict())

    def go_on(model: Any, optimizer: Any, schedule: Any) -> list[float]:
        losses = []
        for index in range(2, 5):
            losses.append(step(model, optimizer, index, rank))
            schedule.step()
        return [*losses, optimizer.param_groups[0]["lr"]]

    expected = go_on(model, optimizer, schedule)
    model, optimizer = build({}, seed=99, optimizer=kind)
    optimizer.param_groups[0]["lr"] = 7.0
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    schedule.load_state_dict(unbounded.load(folder, model, optimizer)["schedule"])
    return expected, go_on(model, optimizer, schedule)


@pytest.mark.every_second
@pytest.mark.parametrize("kind", ["sgd", "nadam", "adagrad", "asgd", "rprop"])
def test_other_optimizers_and_their_schedulers_go_on_bit_for_bit(ranks: Any, tmp_path: Path, kind: str) -> None:
    for expected, resumed in ranks(2, with_optimizer, str(tmp_path / "c"), kind):
        assert resumed == expected


def accumulating(rank: int, world_size: int, folder: str, plan: dict[str, Any], sync: bool) -> tuple[Any, Any]:
    model, optimizer = build(plan)
    train(model, optimizer, 0, 1, rank)

    def first() -> None:
        backward(model, optimizer, 1, rank, 0)

    if sync:
        first()
        backward(model, optimizer, 1, rank, 1)
    else:
        with optimizer.no_sync():
            first()
    unbounded.save(folder, model, optimizer)
    backward(model, optimizer, 1, rank, 2)
    optimizer.step()
    optimizer.zero_grad()
    expected = train(model, optimizer, 2, 4, rank)
    model, optimizer = build(plan, seed=99)
    backward(model, optimizer, 5, rank)  # to be forgotten
    unbounded.load(folder, model, optimizer)
    backward(model, optimizer, 1, rank, 2)
    optimizer.step()
    optimizer.zero_grad()
    return expected, train(model, optimizer, 2, 4, rank)


@pytest.mark.parametrize("sync", [True, False], ids=["reduced", "no_sync"])
@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        (1, {"gradients": "disk"}),
        (1, {"precision": "bf16", "gradients": "host"}),
        (2, {"precision": "bf16", "gradients": "device"}),
        (2, {"stage": 1}),
        (2, {"stage": 0, "precision": "fp16"}),
    ],
)
def test_gradients_added_up_so_far_are_saved_and_added_to(
    ranks: Any, tmp_path: Path, world_size: int, plan: dict[str, Any], sync: bool
) -> None:
    for expected, resumed in ranks(world_size, accumulating, str(tmp_path / "c"), plan, sync):
        assert resumed == expected


def after_step(rank: int, world_size: int, folder: str) -> set[str]:
    model, optimizer = build({})
    backward(model, optimizer, 0, rank)
    optimizer.step()  # no zero_grad: gradients are held, but the step has used them
    unbounded.save(folder, model, optimizer)
    return {kind for kind, _ in whole(folder)}


def test_gradients_that_a_step_has_used_are_not_saved(ranks: Any, tmp_path: Path) -> None:
    for kinds in ranks(2, after_step, str(tmp_path / "c")):
        assert "gradient" not in kinds
        assert "exp_avg" in kinds


def before_step(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model, optimizer = build({"precision": "bf16"})
    unbounded.save(folder, model, optimizer)
    expected = train(model, optimizer, 0, 3, rank)
    model, optimizer = build({"precision": "bf16"}, seed=99)
    train(model, optimizer, 5, 7, rank)
    unbounded.load(folder, model, optimizer)
    return expected, train(model, optimizer, 0, 3, rank)


def test_a_checkpoint_from_before_the_first_step_starts_the_same_training(ranks: Any, tmp_path: Path) -> None:
    for expected, resumed in ranks(2, before_step, str(tmp_path / "c")):
        assert resumed == expected


def scaled(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model, optimizer = build({"precision": "fp16"})
    for index in range(3):
        loss = model(torch.full((3, 5), index)) * (1e6 if index == 1 else 1.0)  # overflows once
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    unbounded.save(folder, model, optimizer)
    before = optimizer.loss_scale, optimizer.skipped_steps
    model, optimizer = build({"precision": "fp16"}, seed=99)
    unbounded.load(folder, model, optimizer)
    return before, (optimizer.loss_scale, optimizer.skipped_steps)


def test_the_loss_scale_and_its_count_come_back(ranks: Any, tmp_path: Path) -> None:
    before, after = ranks(1, scaled, str(tmp_path / "c"))[0]
    assert before[0].value < 2.0**16  # it did overflow
    assert before[1] > 0
    assert after == before


def own_things(rank: int, world_size: int, folder: str) -> tuple[Any, Any, Any, Any]:
    model, optimizer = build({})
    train(model, optimizer, 0, 1, rank)  # every rank has its own batches, and so its own running means
    torch.manual_seed(100 + rank)
    unbounded.save(folder, model, optimizer, position=rank * 10, same="everywhere")
    mean, noise = model.norm.running_mean.clone(), torch.rand(3)
    model, optimizer = build({}, seed=99)
    extra = unbounded.load(folder, model, optimizer)
    return extra, torch.equal(model.norm.running_mean, mean), torch.equal(torch.rand(3), noise), mean


def load_of_own_things(rank: int, world_size: int, folder: str) -> tuple[Any, list[str]]:
    model, optimizer = build({})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = unbounded.load(folder, model, optimizer)
    return extra, [str(warning.message) for warning in caught]


def test_what_is_each_ranks_own_comes_back_to_it(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2, own_things, str(tmp_path / "c"))
    assert not torch.equal(results[0][3], results[1][3])
    for rank, (extra, same_mean, same_noise, _) in enumerate(results):
        assert extra == {"position": rank * 10, "same": "everywhere"}
        assert same_mean
        assert same_noise
    assert [told for _, told in ranks(2, load_of_own_things, str(tmp_path / "c"))] == [[], []]
    (first, told), *others, (last, _) = ranks(3, load_of_own_things, str(tmp_path / "c"))
    assert len(told) == 1
    assert "the extra values position differ between the 2 ranks that saved" in told[0]
    assert [told for _, told in others] == [[]]
    assert first == last == {"position": 0, "same": "everywhere"}  # which had saved nothing


def save_in_background(
    rank: int, world_size: int, folder: str, plan: dict[str, Any], copied: bool = False
) -> tuple[Any, Any, bool]:
    from unbounded.checkpoint.save import save_job

    has_room = save_job.SaveJob._has_room_to_copy
    save_job.SaveJob._has_room_to_copy = lambda self: copied or has_room(self)
    try:
        return _save_in_background(rank, folder, plan)
    finally:
        save_job.SaveJob._has_room_to_copy = has_room


def _save_in_background(rank: int, folder: str, plan: dict[str, Any]) -> tuple[Any, Any, bool]:
    model, optimizer = build(plan)
    train(model, optimizer, 0, 2, rank)
    unbounded.save(f"{folder}/now", model, optimizer)
    handle = unbounded.save(f"{folder}/background", model, optimizer, wait=False, note=torch.ones(3))
    first = train(model, optimizer, 2, 5, rank)
    handle.wait()
    other, optimizer = build(plan, seed=99)
    extra = unbounded.load(f"{folder}/background", other, optimizer)
    return first, train(other, optimizer, 2, 5, rank), torch.equal(extra["note"], torch.ones(3))


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_in_the_background_holds_the_states_of_its_moment(
    ranks: Any, tmp_path: Path, world_size: int, tier: str
) -> None:
    plan = {"precision": "bf16", "weights": tier, "optimizer": tier}
    for expected, resumed, same in ranks(world_size, save_in_background, str(tmp_path), plan):
        assert resumed == expected
        assert same
    assert_same(whole(tmp_path / "now"), whole(tmp_path / "background"))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_states_that_a_device_has_room_to_copy_are_saved_from_the_copy(ranks: Any, tmp_path: Path, stage: int) -> None:
    plan = {"precision": "bf16", "weights": "device", "optimizer": "device", "stage": stage}
    for expected, resumed, same in ranks(2, save_in_background, str(tmp_path), plan, True):
        assert resumed == expected
        assert same
    assert_same(whole(tmp_path / "now"), whole(tmp_path / "background"))


def slowed(rank: int, world_size: int, folder: str) -> tuple[Any, Any, list[str]]:
    """A save whose chunks are slow, so that the update comes before its states were read, and without room to copy."""
    import time

    from unbounded.checkpoint.save import segments, writer

    events: list[str] = []
    take = writer.Writer.work
    writer.CHUNK_BYTES = writer.BLOCK_BYTES = segments.CHUNK_BYTES = segments.LARGE_BYTES = (
        4096  # many chunks of a small file
    )

    def slow(self: Any, chunk: Any) -> Any:
        time.sleep(0.01)
        events.append("read")
        return take(self, chunk)

    writer.Writer.work = slow
    try:
        model, optimizer = build({"weights": "host", "optimizer": "host"})
        optimizer.tiers.borrow_host = lambda num_bytes: False
        train(model, optimizer, 0, 2, rank)
        unbounded.save(f"{folder}/now", model, optimizer)
        events.clear()
        handle = unbounded.save(f"{folder}/background", model, optimizer, wait=False)
        events.append("returned")
        first = train(model, optimizer, 2, 3, rank)
        optimizer.wait()
        events.append("stepped")
        handle.wait()
    finally:
        writer.Writer.work = take
        writer.CHUNK_BYTES = segments.CHUNK_BYTES = 16 << 20
        writer.BLOCK_BYTES = segments.LARGE_BYTES = 1 << 20
    other, optimizer = build({}, seed=99)
    unbounded.load(f"{folder}/background", other, optimizer)
    return first, train(other, optimizer, 2, 3, rank), events


def test_a_step_waits_for_what_a_slow_save_has_not_read_yet(ranks: Any, tmp_path: Path) -> None:
    expected, resumed, events = ranks(1, slowed, str(tmp_path))[0]
    assert resumed == expected
    assert_same(whole(tmp_path / "now"), whole(tmp_path / "background"))
    assert events[: events.index("stepped")].count("read") > 10


def weights_only(rank: int, world_size: int, folder: str) -> tuple[Any, Any, str]:
    model, optimizer = build({"precision": "bf16"})
    train(model, optimizer, 0, 2, rank)
    unbounded.save(folder, model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = build({"precision": "bf16"}, seed=99)
    with pytest.raises(unbounded.CheckpointError, match="saved without an optimizer"):
        unbounded.load(folder, model, optimizer)
    unbounded.load(folder, model)
    return expected, dict(model.state_dict()), ""


def test_weights_alone_are_saved_and_loaded_without_an_optimizer(ranks: Any, tmp_path: Path) -> None:
    for expected, loaded, _ in ranks(2, weights_only, str(tmp_path / "c")):
        assert_same(expected, loaded)
    assert {kind for kind, _ in whole(tmp_path / "c")} == {"weight", "remainder", "buffer"}


class Strided(Odd):
    """Buffers that torch calls contiguous although they are not, that repeat one element, or that only note a sign.

    It has an extra state, too, which every rank has of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Any] = {}
        self.register_buffer("single", torch.arange(10.0)[5::5])
        self.register_buffer("repeated", torch.tensor([[3.0], [4.0]]).expand(2, 5))
        self.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 1j]).conj())
        self.register_buffer("negative", torch.tensor([1 + 2j, 3 - 1j]).conj().imag)

    def get_extra_state(self) -> Any:
        return self.noted

    def set_extra_state(self, state: Any) -> None:
        self.noted = state


def strided(rank: int, world_size: int, folder: str) -> list[tuple[Any, Any]]:
    own = dict(Strided().named_buffers())
    model, optimizer = build({}, kind=Strided)
    expected = train(model, optimizer, 0, 2, rank)
    model, optimizer = build({}, kind=Strided)
    first = train(model, optimizer, 0, 1, rank)
    values = {"single": own["single"], "negative": own["negative"]}
    model.noted = {"rank": rank, "most": torch.full((2,), 3.0)}
    unbounded.save(f"{folder}/c", model, optimizer, values=values)
    unbounded.export(f"{folder}/e", model)
    model, optimizer = build({}, seed=99, kind=Strided)
    for name in ("single", "repeated", "conjugate", "negative"):
        buffer = getattr(model, name)
        buffer[(slice(None), 0) if name == "repeated" else slice(None)] = 7
    extra = unbounded.load(f"{folder}/c", model, optimizer)
    loaded = extra["values"]
    exported = load_file(f"{folder}/e/model.safetensors")
    found = [(expected, [*first, *train(model, optimizer, 1, 2, rank)]), (["values"], [*extra])]
    found += [(rank, model.noted["rank"]), ([3.0, 3.0], model.noted["most"].tolist())]
    for name in ("single", "repeated", "conjugate", "negative"):
        found += [(own[name].tolist(), getattr(model, name).tolist()), (own[name].tolist(), exported[name].tolist())]
    return found + [(values[name].tolist(), loaded[name].tolist()) for name in values]


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_and_values_with_any_strides_and_signs_and_extra_states_come_back(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    for results in ranks(world_size, strided, str(tmp_path)):
        for expected, found in results:
            assert found == expected


class Noting(nn.Linear):
    def get_extra_state(self) -> Any:
        return 3

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("there is none")


def test_a_checkpoint_without_the_extra_state_of_a_module_says_so(tmp_path: Path) -> None:
    plain, _ = unbounded.shard(nn.Sequential(nn.Linear(4, 4)), None, {})
    unbounded.save(tmp_path / "c", plain)
    model, _ = unbounded.shard(nn.Sequential(Noting(4, 4)), None, {})
    with pytest.warns(UserWarning, match=r"no extra state for this rank's 0, which keep theirs"):
        unbounded.load(tmp_path / "c", model)
    torch.testing.assert_close(model.state_dict()["0.weight"], plain.state_dict()["0.weight"])
