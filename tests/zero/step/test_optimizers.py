"""Stock optimizers, sharded: the updates of torch.optim, groups with their own values, schedulers, changes mid-run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import (
    Batch,
    Run,
    Task,
    assert_parity,
    average_gradients,
    shard,
    train_both,
    train_ours,
    train_plain,
)

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, no decay, other betas": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamW, maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "Adam, L2": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "Adagrad, decay": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "RMSprop, centered momentum": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2, "weight_decay": 0.01}),
    "NAdam, decoupled": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
}


class With(Task):
    """The tiny model under the optimizer of this name."""

    steps = 6

    def __init__(self, name: str) -> None:
        self.name = name

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind, arguments = OPTIMIZERS[self.name]
        return kind(model.parameters(), **arguments)


class Groups(Task):
    """Biases and norms in another group than matrices, as everyone does: the groups cut across every unit."""

    steps = 4

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.3, "lr": 2e-2},
                {"params": vectors, "weight_decay": 0.0, "betas": (0.5, 0.9)},
            ],
            lr=1e-3,
        )


class LateGroup(Groups):
    """One more group is added to the optimizer before sharding, in another order than the model's."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())[::-1]
        optimizer = torch.optim.AdamW(parameters[:7], lr=1e-2)
        optimizer.add_param_group({"params": parameters[7:], "lr": 3e-3})
        return optimizer


class Scheduled(Groups):
    """A warm-up followed by a cosine, in torch's own schedulers."""

    steps = 8

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])


class ChangedByHand(Groups):
    def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[1]["weight_decay"] = 0.1 * step


class Unlike(Task):
    """Groups of one optimizer that keep different states, or decay in different ways."""

    steps = 4

    def __init__(self, kind: Any, options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        return self.kind([{"params": matrices}, {"params": vectors, **self.options}], lr=1e-2, weight_decay=0.3)


UNLIKE = {
    "Adam, one group decoupled": Unlike(torch.optim.Adam, {"decoupled_weight_decay": True}),
    "AdamW, one group with amsgrad": Unlike(torch.optim.AdamW, {"amsgrad": True}),
    "RMSprop, one group with momentum": Unlike(torch.optim.RMSprop, {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3)])
def test_updates_equal_those_of_torch(ranks: Any, name: str, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, With(name), {"stage": stage}))


@pytest.mark.parametrize(
    "task", [Groups(), LateGroup(), Scheduled(), ChangedByHand()], ids=lambda task: type(task).__name__
)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (4, 3)])
def test_groups_keep_their_own_values(ranks: Any, task: Task, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_may_differ_in_kind(ranks: Any, name: str, world_size: int) -> None:
    assert_parity(ranks(world_size, train_both, UNLIKE[name], {}))


@pytest.mark.parametrize("optimizer_format", ["exact", "compact"])
def test_a_sum_that_begins_above_zero_does_so_for_a_model_on_meta_too(optimizer_format: str) -> None:
    moved = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            model = nn.Linear(128, 128).to(torch.bfloat16)
        group = {"params": model.parameters(), "initial_accumulator_value": 5.0}  # torch does not use a group's own
        optimizer = torch.optim.Adagrad([group], lr=0.1, initial_accumulator_value=100.0)
        model, optimizer = unbounded.shard(model, optimizer, {"optimizer_format": optimizer_format})
        before = model.state_dict()["weight"].float()
        model(torch.ones(2, 128, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        moved.append(float((model.state_dict()["weight"].float() - before).abs().mean()))
    assert moved[1] == pytest.approx(moved[0], rel=1e-2)
    assert moved[0] == pytest.approx(0.1 * 2 / 104**0.5, rel=5e-2)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_step_that_cannot_be_planned_changes_nothing_and_the_next_one_runs(tier: str, tmp_path: Path) -> None:
    task, plan = Groups(), {"optimizer": tier, "disk_path": str(tmp_path)}
    reference = train_ours(0, 1, task, {})
    torch.manual_seed(3)
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), plan)
    losses = []
    for step in range(task.steps):
        loss = task.loss(model, Batch(step, 0, 0))
        loss.backward()
        losses.append(float(loss.detach()))
        rate, optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"], None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    assert losses == reference.losses
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.weights[name]), name


def sharded_optimizer(rank: int, world_size: int) -> tuple[bool, list[dict[str, Any]], list[dict[str, Any]]]:
    task = Groups()
    model = task.model()
    before = task.optimizer(model)
    values = [{k: v for k, v in group.items() if k != "params"} for group in before.param_groups]
    _, after = shard(model, before, {})
    kept = [{k: v for k, v in group.items() if k != "params"} for group in after.param_groups]
    return isinstance(after, torch.optim.Optimizer), values, kept


def test_the_optimizer_is_a_torch_optimizer_with_its_groups_kept(ranks: Any) -> None:
    for is_optimizer, before, after in ranks(2, sharded_optimizer):
        assert is_optimizer
        assert [{**group, **before[i]} for i, group in enumerate(after)] == after


def run_closure(rank: int, world_size: int) -> float:
    task = Task()
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.loss(model, Batch(0, 0, rank))
        loss.backward()
        return loss

    return float(optimizer.step(closure))


def test_a_closure_is_called_and_its_loss_returned(ranks: Any) -> None:
    assert all(loss > 0 for loss in ranks(2, run_closure))


def continue_sharded(rank: int, world_size: int, name: str) -> tuple[Run, Run]:
    """Two steps of plain training, then the model and its optimizer are sharded as they are."""
    torch.manual_seed(3)
    task = With(name)
    plain = task.model()
    reference = train_plain(task, copy.deepcopy(plain), rank=rank, world_size=world_size)
    optimizer, ours = task.optimizer(plain), Run()
    model = plain
    for step in range(task.steps):
        if step == 2:
            model, optimizer = shard(plain, optimizer, {})
        loss = task.loss(model, Batch(step, 0, rank))
        loss.backward()
        if step < 2:
            average_gradients(plain, world_size)
        ours.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    ours.weights = {key: value.clone() for key, value in model.state_dict().items()}
    return reference, ours


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "Adagrad", "NAdam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_has_stepped_goes_on_from_its_states(ranks: Any, name: str, world_size: int) -> None:
    assert_parity(ranks(world_size, continue_sharded, name))


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "NAdam"])
def test_in_fp64_taken_over_states_and_clipping_have_its_digits(name: str) -> None:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        task = With(name)
        model: Any = task.model().double()
        optimizer: Any = task.optimizer(model)
        for step in range(4):
            if step == 2 and is_sharded:
                model, optimizer = unbounded.shard(model, optimizer, {})
            task.loss(model, Batch(step, 0, 0)).backward()
            if is_sharded and step >= 2:
                norm = optimizer.clip_grad_norm_(0.1)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append({"norm": norm, **{name: value.clone() for name, value in model.state_dict().items()}})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-13)
