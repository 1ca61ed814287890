"""States move between device and host while a model trains: the same bits, the same counts as if the model had been
placed so, and moves that stop when steps get longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import TinyGPT
from unbounded.errors import BudgetError
from unbounded.planner.balance import SETTLE_STEPS, TIMED_STEPS, WARM_STEPS, Balance
from unbounded.planner.sizes import allocatable_bytes
from unbounded.sharding import device_room
from unbounded.sharding.running import sharded
from unbounded.zero.step.balancer import Balancer
from unbounded.zero.step.relocation import Relocation, device_bytes, planned_bytes

HOST = {"weights": "host", "gradients": "host", "optimizer": "host"}


def build(plan: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = TinyGPT()
    return unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-3), plan)


def train(rank: int, plan: dict[str, Any], steps: int, between: Callable[[int, nn.Module, Any], None]) -> list[Any]:
    model, optimizer = build(plan)
    losses = []
    for step in range(steps):
        between(step, model, optimizer)
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            loss = model.loss(torch.randint(0, 17, (2, 9), generator=generator))
            loss.backward()
            losses.append(loss.item())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, {name: value.clone() for name, value in model.state_dict().items()}, optimizer.plan]


def relocation(model: nn.Module) -> Relocation:
    state = sharded(model)
    return Relocation(state.engine, state.tiers, state.bounce)


def move_to_and_fro(step: int, model: nn.Module, _: Any) -> None:
    """Two units up, one more, one back, all back."""
    mover = relocation(model)
    for unit in mover.units_on("host")[: (0, 2, 1, 0, 0)[step]]:
        mover.move(unit, "device")
    for unit in mover.units_on("device")[: (0, 0, 0, 1, 9)[step]]:
        mover.move(unit, "host")


def leave(*_: Any) -> None:
    """Moves nothing."""


def compare(rank: int, size: int) -> None:
    plans: list[dict[str, Any]] = [{**HOST, "stage": 3}, {**HOST, "stage": 3, "precision": "bf16"}]
    plans += [{"stage": 1, "gradients": "host", "optimizer": "host"}] if size > 1 else []
    for plan in plans:
        losses, values, _ = train(rank, plan, 5, leave)
        moved_losses, moved_values, _ = train(rank, plan, 5, move_to_and_fro)
        assert moved_losses == losses
        assert all(torch.equal(moved_values[name], value) for name, value in values.items())


@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_with_the_same_bits_wherever_states_are_moved(ranks: Any, size: int) -> None:
    ranks(size, compare)


def test_what_moved_is_counted_where_it_is_now() -> None:
    model, optimizer = build(HOST)
    mover = relocation(model)
    before, units = optimizer.memory(), mover.units_on("host")
    moved = units[:2]
    for unit in moved:
        mover.move(unit, "device")
    after, states = optimizer.memory(), sum(a.numel * a.dtype.itemsize for u in moved for a in u.states.values())
    assert after["device"].used_bytes - before["device"].used_bytes == states
    assert before["host"].used_bytes - after["host"].used_bytes == states
    for unit in moved:
        mover.move(unit, "host")
    assert optimizer.memory() == before
    assert [unit.name for unit in mover.units_on("host")] == [unit.name for unit in units]


def test_a_unit_stays_where_the_host_has_no_room() -> None:
    model, optimizer = build({"host_bytes": "64MiB", "device_bytes": "64MiB", "optimizer": "device"})
    state, mover = sharded(model), relocation(model)
    unit = mover.units_on("device")[0]
    state.tiers.budgets["host"] = state.tiers.held_host_bytes() + planned_bytes(unit) - 1
    before, arrays = optimizer.memory(), dict(unit.states)
    with pytest.raises(BudgetError, match="Raise host_bytes"):
        mover.move(unit, "host")
    assert optimizer.memory() == before
    assert unit.states == arrays


def test_a_checkpoint_of_moved_states_is_one_of_any_others(tmp_path: Path) -> None:
    def save(step: int, model: nn.Module, optimizer: Any) -> None:
        move_to_and_fro(step, model, optimizer)
        if step == 3:
            unbounded.save(tmp_path / "c", model, optimizer)

    def load(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 3:
            unbounded.load(tmp_path / "c", model, optimizer)

    losses, values, _ = train(0, HOST, 5, save)
    again, found, _ = train(0, {}, 5, load)
    assert again[6:] == losses[6:]
    assert all(torch.equal(found[name], value) for name, value in values.items())


class Clock:
    """A step takes `seconds`, a function of how many units are on the device."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.now


def balance(seconds: Callable[[int], float], *, free: int, kept: int, steps: int = 60) -> tuple[list[Any], Any]:
    """Trains with a made-up clock and device, on which every unit takes 1; returns where states end up."""
    clock = Clock(seconds)

    def follow(step: int, model: nn.Module, optimizer: Any) -> None:
        mover = relocation(model)
        if step == 0:
            sizes = [device_bytes(unit) for unit in mover.units_on("host")]
            follow.largest = max(sizes)  # type: ignore[attr-defined]
            Balancer(
                optimizer,
                mover,
                free_bytes=lambda: follow.largest * (free - len(mover.units_on("device"))),  # type: ignore[attr-defined]
                kept_bytes=lambda: follow.largest * kept,  # type: ignore[attr-defined]
                forget=lambda: None,
                clock=clock,
            ).attach(model)
        clock.now += seconds(len(mover.units_on("device")))

    result = train(0, HOST, steps, follow)
    return result, result[2]


def test_states_move_until_the_step_gets_longer() -> None:
    plain, values, start = train(0, HOST, 24, leave)
    assert {tier for _, tier in start.optimizer} == {"host"}
    (losses, found, _), plan = balance(
        lambda count: 1.0 - 0.1 * min(count, 2) + 0.1 * (count > 3), free=3, kept=8, steps=24
    )
    on_device = [name for name, tier in plan.optimizer if tier == "device"]
    assert 2 <= len(on_device) < len(plan.optimizer)
    assert dict(plan.gradients) == dict(plan.optimizer)
    assert losses == plain
    assert all(torch.equal(found[name], value) for name, value in values.items())
    _, again = build({"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer})
    assert again.plan.optimizer == plan.optimizer


def test_states_that_made_the_step_longer_go_back() -> None:
    _, plan = balance(lambda count: 1.0 + 0.1 * count, free=3, kept=0, steps=16)
    assert {tier for _, tier in plan.optimizer} == {"host"}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_states_go_back_before_a_forward_with_larger_inputs_than_were_seen(rows: int) -> None:
    """And stay there: 2 rows were seen. A forward without a graph counts too."""

    def grow(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0:
            clock = Clock(float)
            free = lambda: 2**40  # noqa: E731
            Balancer(optimizer, relocation(model), free_bytes=free, kept_bytes=int, forget=leave, clock=clock).attach(
                model
            )
        if step == 12:
            assert {tier for _, tier in optimizer.plan.optimizer} == {"device"}
            with torch.no_grad():
                model(torch.zeros(rows, 8, dtype=torch.long))
            assert {tier for _, tier in optimizer.plan.optimizer} == {"device" if rows < 3 else "host"}

    losses, values, plan = train(0, HOST, 14, grow)
    assert {tier for _, tier in plan.optimizer} == {"device" if rows < 3 else "host"}
    plain, expected, _ = train(0, HOST, 14, leave)
    assert losses == plain
    assert all(torch.equal(expected[name], value) for name, value in values.items())


def test_states_go_back_before_inputs_that_were_seen_only_before_the_last_move() -> None:
    """The second move relies on a peak of smaller inputs than the first one saw."""

    def follow(step: int, model: nn.Module, optimizer: Any) -> None:
        mover = relocation(model)
        if step == 0:
            largest = max(device_bytes(unit) for unit in mover.units_on("host"))
            free = lambda: int(1.1 * largest)  # noqa: E731
            Balancer(optimizer, mover, free_bytes=free, kept_bytes=int, forget=leave, clock=float).attach(model)
        if step in (1, 14):
            assert bool(mover.units_on("device")) == (step == 14)
            model(torch.zeros(3, 8, dtype=torch.long))
            assert not mover.units_on("device")

    train(0, HOST, 15, follow)


def test_states_go_back_after_a_batch_that_did_not_fit() -> None:
    def follow(step: int, model: nn.Module, optimizer: Any) -> None:
        mover = relocation(model)
        if step == 0:
            clock, free = Clock(float), lambda: 2**40
            follow.balancer = Balancer(  # type: ignore[attr-defined]
                optimizer, mover, free_bytes=free, kept_bytes=int, forget=leave, clock=clock
            )
            follow.balancer.attach(model)  # type: ignore[attr-defined]
        if step == 12:
            assert not mover.units_on("host")
            follow.balancer.note_shortage()  # type: ignore[attr-defined]
        if step == 13:
            assert not mover.units_on("device")

    losses, _, plan = train(0, HOST, 14, follow)
    assert {tier for _, tier in plan.optimizer} == {"host"}
    assert losses == train(0, HOST, 14, leave)[0]


def test_a_gradient_that_several_backwards_add_up_counts_as_wide_as_it_is() -> None:
    def follow(step: int, model: nn.Module, _: Any) -> None:
        unit = relocation(model).units_on("host")[0]
        wide = 4 if step else 2  # two backwards per step
        assert device_bytes(unit) - planned_bytes(unit) == (wide - 2) * unit.gradient.store.numel

    train(0, {**HOST, "precision": "bf16"}, 2, follow)


def test_what_may_be_allocated_leaves_out_what_a_promised_budget_has_outside_the_allocator() -> None:
    model, _ = build({**HOST, "device_bytes": "64MiB"})
    assert device_room.allocation_limit(model)() == allocatable_bytes(64 * 2**20)
    promise = SimpleNamespace(cap_bytes=40 * 2**20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device_room._promises, model, promise)
        limit = device_room.allocation_limit(model)
        assert limit() == allocatable_bytes(40 * 2**20)
        promise.cap_bytes = 30 * 2**20  # more kernels were loaded
        assert limit() == allocatable_bytes(30 * 2**20)


def test_a_copy_of_a_model_whose_states_move_is_plain() -> None:
    def follow(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0:
            balancer = Balancer(optimizer, relocation(model), free_bytes=int, kept_bytes=int, forget=leave, clock=float)
            balancer.attach(model)
            twin = copy.deepcopy(model)
            assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}
            inputs = torch.zeros(3, 8, dtype=torch.long)
            assert torch.equal(twin(inputs), model(inputs))

    train(0, HOST, 1, follow)


def decide(best: int, *, free: int, kept: int) -> tuple[int, int]:
    """How many of 20 units end on the device, and after how many steps; each saves time, up to `best` of them."""
    choice, count, steps = Balance(), 0, 0
    while not choice.is_done and steps < 500:
        seconds = 1.0 - 0.02 * min(count, best) + 0.02 * max(0, count - best)
        count += choice.after_step(
            seconds, free_bytes=100 * (free - count), kept_bytes=100 * kept, waiting=[100] * (20 - count)
        )
        steps += 1
    return count, steps


@pytest.mark.parametrize(("best", "free", "kept"), [(20, 0, 0), (20, 6, 0), (20, 30, 0), (4, 2, 20), (0, 5, 9)])
def test_the_decision_ends_at_a_count_that_no_move_improves(best: int, free: int, kept: int) -> None:
    count, steps = decide(best, free=free, kept=kept)
    assert steps < WARM_STEPS + 8 * (SETTLE_STEPS + TIMED_STEPS)
    assert count <= max(best, 0) + max(1, kept // 4)
    assert count >= min(best, int(free * 15 / 16))


def test_a_batch_that_needs_room_gets_what_states_take() -> None:
    def follow(step: int, model: nn.Module, optimizer: Any) -> None:
        mover = relocation(model)
        if step == 2:
            balancer = Balancer(optimizer, mover, free_bytes=int, kept_bytes=int, forget=leave)
            last = mover.units_on("device")[-1]
            balancer.make_room(device_bytes(last))
            assert mover.units_on("host") == [last]
            assert dict(optimizer.plan.optimizer)[last.name] == "host"
            balancer.make_room(2**60)
            assert not mover.units_on("device")

    plain, values, _ = train(0, {"optimizer": "device"}, 4, leave)
    losses, found, _ = train(0, {"optimizer": "device"}, 4, follow)
    assert losses == plain
    assert all(torch.equal(found[name], value) for name, value in values.items())
