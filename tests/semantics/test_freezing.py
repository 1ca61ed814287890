"""Freezing and unfreezing after `shard`, groups that are added, and parameters that no group has."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.semantics.programs import PLANS, WORLDS, Net, adamw, assert_same, compare, data, make, step, weights
from unbounded.errors import BudgetError, CheckpointError, PeerError, StateError


def mostly_frozen() -> nn.Module:
    model = Net().bfloat16().float()  # values that bf16 has: what is frozen in bf16 is rounded to it
    for part in (model.first, model.blocks):
        part.requires_grad_(False)
    return model


def all_of_it(model: nn.Module) -> torch.optim.Optimizer:
    """All parameters, including the frozen ones."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """All parameters, with the states of steps before some of them were frozen."""
    optimizer, trained = all_of_it(model), [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True)
    for number in range(10, 12):
        step(model, optimizer, number)
    for parameter, is_trained in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(is_trained)
    return optimizer


def add_and_train(model: nn.Module, optimizer: Any) -> Any:
    """Gradual unfreezing: a block, single parameters of another block and of the root, each in its own group."""
    losses = [step(model, optimizer, number) for number in range(2)]
    model.blocks[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[2].parameters()), "lr": 3e-3})
    losses += [step(model, optimizer, number) for number in range(2, 4)]
    optimizer.add_param_group({"params": [model.blocks[1].up.weight, model.first.bias], "weight_decay": 0.1})
    model.blocks[1].up.weight.requires_grad = True
    model.first.bias.requires_grad_()
    losses += [step(model, optimizer, number) for number in range(4, 6)]
    model.blocks[2].up.requires_grad_(False)
    model.blocks[1].down.requires_grad_()  # without a group: a gradient that nobody uses or clears
    losses += [step(model, optimizer, number) for number in range(6, 8)]
    has_gradient = [parameter.grad is not None for parameter in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.add_param_group({"params": list(model.blocks[1].down.parameters())})
    losses += [step(model, optimizer, number) for number in range(8, 10)]
    return losses, has_gradient, weights(model)


def train_what_was_given(model: nn.Module, optimizer: Any) -> Any:
    """Parameters that the optimizer had while they were frozen are unfrozen, inside `full_params` and outside."""
    losses = [step(model, optimizer, 0)]
    if hasattr(optimizer, "engine"):
        with unbounded.full_params(model):
            model.blocks[0].requires_grad_(True)
    else:
        model.blocks[0].requires_grad_(True)
    losses += [step(model, optimizer, 1)]
    model.requires_grad_(True)
    losses += [step(model, optimizer, number) for number in range(2, 4)]
    return losses, weights(model)


@pytest.mark.every_second
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_was_frozen_is_trained_as_plain_pytorch_does(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, add_and_train, mostly_frozen)
    compare(ranks, world, add_and_train, mostly_frozen, momentum)
    compare(ranks, world, train_what_was_given, mostly_frozen, all_of_it)
    compare(ranks, world, train_what_was_given, mostly_frozen, stepped)


def thawed_and_saved(rank: int, world_size: int, stage: int, extra: dict[str, Any], folder: str) -> None:
    """A unit that was frozen at `shard` trains, is saved and loaded like one that was frozen after it."""
    plan = {"stage": stage, "loss_scale": 1, "loss_scale_window": 0, **extra}
    if world_size > 1 and stage < 3:
        plan.pop("weights", None)
    model = make(mostly_frozen)
    model, optimizer = unbounded.shard(model, all_of_it(model), plan)
    reference = make(mostly_frozen)
    reference.requires_grad_(True)
    reference, expected = unbounded.shard(reference, all_of_it(reference), plan)
    reference.first.requires_grad_(False)
    reference.blocks.requires_grad_(False)
    for held in (model, reference):
        held.blocks[1].requires_grad_(True)
    losses = [[step(m, o, n) for n in range(3)] for m, o in ((model, optimizer), (reference, expected))]
    assert losses[0] == losses[1]
    unbounded.save(folder, model, optimizer)
    later = step(model, optimizer, 3)

    again = make(mostly_frozen)
    again, resumed = unbounded.shard(again, all_of_it(again), plan)
    with pytest.raises(CheckpointError, match=r"blocks\.1\..*frozen here"):
        unbounded.load(folder, again, resumed)
    again.blocks[1].requires_grad_(True)
    unbounded.load(folder, again, resumed)
    assert step(again, resumed, 3) == later
    model.requires_grad_(True)  # an earlier checkpoint has no states of what is trained since
    with pytest.raises(CheckpointError, match=r"no exp_avg of .*blocks\.0"):
        unbounded.load(folder, model, optimizer)


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("world", "precision"),
    [*((world, "bf16") for world in WORLDS), ((1, "disk", 3), "fp16"), ((2, "host", 2), "fp16")],
    ids=str,
)
def test_masters_begin_with_the_weights_and_checkpoints_have_what_was_unfrozen(
    ranks: Any, world: tuple[int, str, int], precision: str
) -> None:
    world_size, plan, stage = world
    with tempfile.TemporaryDirectory() as folder:
        ranks(world_size, thawed_and_saved, stage, {**PLANS[plan], "precision": precision}, folder)


def ranks_that_differ(rank: int, world_size: int, stage: int, what: str) -> None:
    model = make(mostly_frozen)
    model, optimizer = unbounded.shard(model, all_of_it(model), {"stage": stage})
    step(model, optimizer)
    if what == "unfrozen":
        model.blocks[rank].requires_grad_(True)
        with pytest.raises(PeerError, match=r"unfrozen since shard: blocks\.1.* instead of .*blocks\.0"):
            step(model, optimizer)
    elif what == "frozen" and rank == 1:
        model.last.bias.requires_grad_(False)
    if what == "frozen":
        with pytest.raises(PeerError, match=r"frozen since shard: last\.bias instead of frozen since shard: nothing"):
            step(model, optimizer)


@pytest.mark.parametrize("what", ["unfrozen", "frozen"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_train_different_parameters_are_told(ranks: Any, stage: int, what: str) -> None:
    ranks(2, ranks_that_differ, stage, what)


def ranks_that_add_differently(rank: int, world_size: int) -> None:
    model = make(mostly_frozen)
    model, optimizer = unbounded.shard(model, adamw(model), {"stage": 2})
    with pytest.raises(PeerError, match=r"blocks\.1\.up\.weight.* instead of .*blocks\.0\.up\.weight"):
        optimizer.add_param_group({"params": [model.blocks[rank].up.weight]})
    assert len(optimizer.param_groups) == 1


def test_ranks_that_add_different_groups_are_told(ranks: Any) -> None:
    ranks(2, ranks_that_add_differently)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_does_not_fit_the_budget_is_refused_and_changes_nothing(tier: str) -> None:
    model = make(mostly_frozen)
    plain = make(mostly_frozen)
    model, optimizer = unbounded.shard(model, all_of_it(model), {**PLANS[tier], "disk_bytes": "1MiB"})
    reference = all_of_it(plain)
    spare = optimizer.tiers.spare_bytes()[tier]
    optimizer.tiers.budgets[tier] -= spare - 100
    before, uses = optimizer.memory(), optimizer.tiers.spare_bytes()
    with pytest.raises(BudgetError, match=rf"unit 'blocks\.0', which was frozen at `shard`.*{tier} is short"):
        model.blocks[0].requires_grad_(True)
    assert optimizer.memory() == before
    assert optimizer.tiers.spare_bytes() == uses
    assert not any(parameter.requires_grad for parameter in model.blocks[0].parameters())
    assert step(model, optimizer) == pytest.approx(step(plain, reference))
    optimizer.tiers.budgets[tier] += spare
    for held in (model, plain):
        held.blocks[0].requires_grad_(True)
    assert_same([step(model, optimizer, n) for n in range(3)], [step(plain, reference, n) for n in range(3)])


def test_groups_that_cannot_be_added_change_nothing() -> None:
    model = make(mostly_frozen)
    model, optimizer = unbounded.shard(model, momentum(model))
    for group, error, match in (
        ({"params": [nn.Parameter(torch.zeros(3))]}, StateError, "not one of the sharded model"),
        ({"params": [model.last.bias]}, ValueError, "more than one parameter group"),
    ):
        with pytest.raises(error, match=match):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    plain = make(mostly_frozen)
    other, adam = unbounded.shard(plain, adamw(plain))
    with pytest.raises(StateError, match=r"other states .*max_exp_avg_sq"):
        adam.add_param_group({"params": [other.first.weight], "amsgrad": True})
    assert len(adam.param_groups) == 1


class Unfreezing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[0].requires_grad_(True)
        return super().forward(x)


def test_unfreezing_inside_a_forward_is_refused() -> None:
    model = Unfreezing()
    model.blocks.requires_grad_(False)
    model, _ = unbounded.shard(model, adamw(model))
    with pytest.raises(StateError, match="between passes"):
        model(data())
