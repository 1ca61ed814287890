"""`gradients="none"`: units are updated inside the backward and no gradient is stored; exact, or refused."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.passes.test_control_flow import (
    HalfUsed,
    Loop,
    OrderByRank,
    PartialGradient,
    SkippedApart,
    UnusedOnOneRank,
)
from tests.zero.setup.test_partition import Frozen, SharedAcrossBlocks, Tied
from tests.zero.training import (
    Batch,
    Run,
    Task,
    assert_identical,
    assert_parity,
    shard,
    train_both,
    train_ours,
    train_plain,
)
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.step.update_pass import UpdatePass

NONE = {"gradients": "none"}
HOST = {"weights": "host", "optimizer": "host"}
DISK = {"weights": "disk", "optimizer": "disk"}


class Muon(Task):
    """Each whole matrix is updated at its home, where the ranks bring it together by an exchange."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(5)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.normal(3, 12)).square().mean()


class Scheduled(Task):
    """The learning rate changes after each step, and a hook changes one gradient."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if batch.step == 0:
            model.head.bias.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return super().loss(model, batch)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


Cases = tuple[tuple[Task, dict[str, Any]], ...]
ALONE: Cases = (
    (Loop(), {}),
    (SharedAcrossBlocks(), HOST),
    (Tied(), DISK),
    (Frozen(), {"weights": "host"}),
    (PartialGradient(), {}),
    (Scheduled(), HOST),
)
TOGETHER: Cases = (
    (SkippedApart(), {"stage": 1}),
    (HalfUsed(), {"stage": 0}),
    (OrderByRank(), {"stage": 2, "optimizer": "host"}),
    (UnusedOnOneRank(), HOST),
    (Tied(), {**DISK, "optimizer": "disk"}),
)
# Compared bit by bit: every use adds to a sum in fp32, and ranks exchange whole matrices.
SAME_BITS: Cases = ((Loop(), {**HOST, "precision": "bf16"}), (Muon(), {"optimizer": "host"}))


def train_cases(
    rank: int, world_size: int, cases: Cases, same_bits: Cases
) -> tuple[list[tuple[Run, Run]], list[tuple[Run, Run]]]:
    found = [train_both(rank, world_size, task, {**plan, **NONE}) for task, plan in cases]
    pairs = [
        tuple(train_ours(rank, world_size, task, {**plan, **gradients}) for gradients in ({}, NONE))
        for task, plan in same_bits
    ]
    return found, pairs  # type: ignore[return-value]


@pytest.mark.parametrize(("world_size", "cases"), [(1, ALONE), (2, TOGETHER)])
def test_training_without_stored_gradients_is_that_of_torch(ranks: Any, world_size: int, cases: Cases) -> None:
    results = ranks(world_size, train_cases, cases, SAME_BITS)
    for index in range(len(cases)):
        assert_parity([found[index] for found, _ in results])
    for _, pairs in results:
        for stored, at_once_ in pairs:
            assert_identical(stored, at_once_)


def train_with_late_fetches(rank: int, world_size: int) -> tuple[Run, Run]:
    """A unit is updated while a fetch of it has not begun yet."""
    fetch = Gathering._fetch

    def late(self: Gathering, *arguments: Any) -> None:
        time.sleep(0.02)
        fetch(self, *arguments)

    Gathering._fetch = late  # type: ignore[method-assign]
    try:
        return train_both(rank, world_size, SharedAcrossBlocks(), {**HOST, **NONE})
    finally:
        Gathering._fetch = fetch  # type: ignore[method-assign]


def test_an_update_and_a_fetch_of_its_unit_do_not_wait_for_each_other(ranks: Any) -> None:
    assert_parity(ranks(1, train_with_late_fetches))


def stack(depth: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(depth)))


def train_stack(plan: dict[str, Any], depth: int = 8) -> Any:
    model = stack(depth)
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"precision": "bf16", **plan})
    for _ in range(2):
        model(torch.randn(2, 256, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return optimizer


def test_states_take_twelve_bytes_a_parameter_and_what_is_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []
    plain_store, plain_update = GradientArray.store, UpdatePass._update

    def store(array: GradientArray, *arguments: Any) -> torch.Tensor | float:
        squares = plain_store(array, *arguments)
        alive.add(array.array)
        counts.append(len(alive))
        return squares

    def update(steps: UpdatePass, piece: Any) -> None:
        time.sleep(0.02)  # a host that is slower than the backward
        plain_update(steps, piece)

    monkeypatch.setattr(GradientArray, "store", store)
    monkeypatch.setattr(UpdatePass, "_update", update)
    stored = train_stack({**HOST, "gradients": "host"})
    counts.clear()
    alive.clear()
    free = train_stack({**HOST, **NONE})
    assert max(counts) <= 5  # of 8: two are being updated, a lane may still hold one that was, one is taken, one came
    assert all(unit.gradient.store.array is None for unit in free.engine.units)
    numel = 8 * 256 * 256
    used = {optimizer: optimizer.memory()["host"].used_bytes for optimizer in (stored, free)}
    assert used[stored] - used[free] == 2 * numel
    arrays = [array for unit in free.engine.units for array in unit.arrays().values()]
    assert sum(array.numel * array.dtype.itemsize for array in arrays) == 12 * numel
    assert not free.plan.keeps_gradients


def test_what_fits_only_without_gradients_is_refused_with_them_and_trains_without() -> None:
    plan = {**HOST, "host_bytes": "36MiB"}
    with pytest.raises(unbounded.BudgetError, match=r"host is short by .*gradients=\"none\" takes 3.0 MiB less"):
        train_stack({**plan, "gradients": "host"}, depth=24)  # 2 bytes x 24 x 256 x 256
    use = train_stack({**plan, **NONE}, depth=24).memory()["host"]
    assert use.used_bytes <= use.budget_bytes


def between(model: Any, optimizer: Any, loss: torch.Tensor, folder: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """What users may do between a backward and its step, and the message that they get."""
    weight, scaler = model.head.weight, torch.amp.GradScaler("cpu")

    def change_rate() -> None:
        before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.25
        try:
            optimizer.step()
        finally:
            optimizer.param_groups[0]["lr"] = before

    early, gone = r"comes between a backward that has updated 6 units", "was used up by an update inside the backward"
    return {
        "forward": (lambda: model(Batch(0, 0, 0).tokens()), f"a forward {early}"),
        "block": (lambda: model.blocks[0](torch.randn(2, 11)), f"a forward {early}"),
        "backward": (loss.backward, f"another backward {early}"),
        "zero_grad": (optimizer.zero_grad, rf"zero_grad\(\) {early}"),
        "model.zero_grad": (model.zero_grad, "cannot be dropped: the backward has updated the unit"),
        "to zeros": (lambda: model.zero_grad(set_to_none=False), gone),
        "clip": (lambda: optimizer.clip_grad_norm_(1.0), r"clip_grad_norm_\(1.0\) needs the gradients of all units"),
        "torch's clip": (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), gone),
        "clip by value": (lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0), gone),
        "scaled": (lambda: scaler.scale(loss) is loss or scaler.unscale_(optimizer), gone),
        "read": (lambda: weight.grad + 1, gone),
        "set": (lambda: setattr(weight, "grad", torch.zeros_like(weight.grad)), gone),
        "nonfinite": (optimizer.nonfinite_units, r"nonfinite_units\(\) needs the gradients of all units"),
        "weights": (lambda: weight + 1, f"a look at the weights of unit 'head' {early}"),
        "written": (lambda: nn.init.zeros_(weight), f"a look at the weights of unit 'head' {early}"),
        "state_dict": (model.state_dict, f"a look at the weights of unit .* {early}"),
        "optimizer.state_dict": (optimizer.state_dict, early),
        "full_params": (lambda: unbounded.full_params(model).__enter__(), early),
        "save": (lambda: unbounded.save(folder, model, optimizer), rf"unbounded.save\(\) {early}"),
        "unshard": (lambda: unbounded.unshard(model), early),
        "lr": (change_rate, r"has updated 6 units already, and its step: lr=0.25 instead of lr=0.003"),
    }


def test_what_would_see_or_change_the_step_before_it_is_called_is_refused_and_the_step_stays_exact(
    tmp_path: Path,
) -> None:
    task = Task()
    torch.manual_seed(3)
    model = task.model()
    reference = train_plain(task, copy.deepcopy(model), rank=0, world_size=1)
    model, optimizer = shard(model, task.optimizer(model), {**HOST, **NONE})
    with pytest.raises(unbounded.StateError, match=r"no_sync\(\) adds up the gradients of several backwards"):
        optimizer.no_sync()
    with pytest.raises(unbounded.StateError, match=r"last_backward\(max_norm=1.0\) needs the gradients of all"):
        optimizer.last_backward(max_norm=1.0).__enter__()
    for step in range(task.steps):
        loss = task.loss(model, Batch(step, 0, 0))
        loss.backward(retain_graph=True)
        for call, told in between(model, optimizer, loss, tmp_path).values():
            with pytest.raises(unbounded.StateError, match=told):
                call()
        optimizer.step()
        with pytest.raises(unbounded.StateError, match=r"would use the gradient of unit .* again"):
            optimizer.step()
        with pytest.raises(unbounded.StateError, match="was used up by an update inside the backward"):
            optimizer.zero_grad(set_to_none=False)
        if step == 0:
            with pytest.raises(unbounded.StateError, match=r"Call optimizer.zero_grad\(\) after each step"):
                task.loss(model, Batch(9, 0, 0)).backward()
        optimizer.zero_grad()
        assert model.head.weight.grad is None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert_parity([(Run(reference.losses, [], reference.weights), Run(reference.losses, [], weights))])


def test_plans_that_contradict_it_are_refused() -> None:
    for fields, told in (
        ({"precision": "fp16"}, "precision is 'fp16': an overflow is known only after the backward"),
        ({"pipeline": 2}, "pipeline is 2: the micro-batches of a pipeline are several backwards"),
        ({"early_units": 1}, "early_units is 1: all units are updated inside the backward already"),
    ):
        with pytest.raises(unbounded.PlanError, match=told):
            unbounded.Plan(gradients="none", **fields)
    with pytest.raises(unbounded.PlanError, match="\"none\" for some units and 'host' for others"):
        unbounded.Plan(gradients=(("blocks.*", "none"), ("*", "host")))
    half = stack(1).half()
    with pytest.raises(unbounded.PlanError, match="precision is 'fp16'"):
        unbounded.shard(half, torch.optim.AdamW(half.parameters()), NONE)
    with pytest.raises(unbounded.PlanError, match="was given no optimizer"):
        unbounded.shard(stack(1), plan=NONE)
    model = stack(1)
    model(torch.randn(1, 256)).sum().backward()
    with pytest.raises(unbounded.PlanError, match=r"the parameter '0.weight' has a gradient already"):
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), NONE)


class Fault(Exception):
    pass


def fail(*_: Any) -> None:
    raise Fault


def train_over_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    """A backward breaks off early, another late, and an update fails; a load follows the last two."""
    task = Task()
    torch.manual_seed(3)
    model = task.model()
    reference = train_plain(task, copy.deepcopy(model), rank=0, world_size=1)
    model, optimizer = shard(model, task.optimizer(model), {**HOST, **NONE})
    ours, saved = Run(), tmp_path / "saved"

    def refused() -> None:
        for call in (lambda: task.loss(model, Batch(0, 0, 0)), optimizer.step, optimizer.zero_grad, model.state_dict):
            with pytest.raises(
                unbounded.StateError, match=r"broke off after it had begun to update .*head.*unbounded.load"
            ):
                call()

    for step in range(task.steps):
        unbounded.save(saved, model, optimizer)
        for module, is_late in ((model.head, False), (model.blocks[0], True)):
            handle = module.register_full_backward_pre_hook(fail)
            loss = task.loss(model, Batch(9, 0, 0))
            with pytest.raises(Fault):
                loss.backward()
            handle.remove()
            if is_late:
                refused()
                with pytest.raises(unbounded.StateError, match="broke off"):  # its moments would stay
                    unbounded.load(saved, model)
                unbounded.load(saved, model, optimizer)
            else:
                optimizer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(UpdatePass, "_update", fail)
            task.loss(model, Batch(9, 0, 0)).backward()
            with pytest.raises(Fault):
                optimizer.step()
        unbounded.load(saved, model, optimizer)
        loss = task.loss(model, Batch(step, 0, 0))
        ours.losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ours.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return reference, ours


def test_a_backward_that_breaks_off_changes_nothing_or_asks_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_parity([train_over_faults(tmp_path, monkeypatch)])


def test_a_checkpoint_with_gradients_that_no_step_has_used_is_not_loaded_where_none_are_stored(tmp_path: Path) -> None:
    task = Task()
    for plan, told in (({}, None), (NONE, "saved with gradients that no step had used")):
        model = task.model()
        model, optimizer = shard(model, task.optimizer(model), plan)
        if told is None:
            task.loss(model, Batch(0, 0, 0)).backward()
            unbounded.save(tmp_path / "between", model, optimizer)
        else:
            with pytest.raises(unbounded.CheckpointError, match=told):
                unbounded.load(tmp_path / "between", model, optimizer)
