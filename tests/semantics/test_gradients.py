"""Gradients between passes: what is read, kept, cleared, replaced or scaled, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.semantics.programs import ALONE, WORLDS, Net, adamw, compare, data, step, weights

pytestmark = pytest.mark.parametrize("world", WORLDS, ids=str)


def backward(model: nn.Module, number: int = 0) -> float:
    loss = model(data(number)).square().mean()
    loss.backward()
    return float(loss.detach())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def clear_by_the_model(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for number in range(4):
        losses.append(backward(model, number))
        optimizer.step()
        model.zero_grad()
    return losses, weights(model)


def clear_one_by_one(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for number in range(4):
        losses.append(backward(model, number))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return losses, weights(model)


def clear_in_place(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for number in range(4):
        losses.append(backward(model, number))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
    return losses, weights(model)


def clear_some(model: nn.Module, optimizer: Any) -> Any:
    """What is cleared of one block stays cleared; the others add up over two backwards."""
    for number in range(3):
        backward(model, number)
        for parameter in model.blocks[1].parameters():
            parameter.grad = None
        backward(model, number + 10)
        model.blocks[2].up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def no_clearing(model: nn.Module, optimizer: Any) -> Any:
    losses = [backward(model, 0)]
    optimizer.step()
    losses.append(backward(model, 1))
    optimizer.step()
    optimizer.step()
    return losses, weights(model)


def clip_then_add(model: nn.Module, optimizer: Any) -> Any:
    """A backward after clipping adds to what was clipped; a second step uses what the first used."""
    backward(model, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    backward(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.step()
    return norm, weights(model)


def clip_part(model: nn.Module, optimizer: Any) -> Any:
    """Clipping one block alone, and twice."""
    for number in range(2):
        backward(model, number)
        first = torch.nn.utils.clip_grad_norm_(model.blocks[0].parameters(), 0.01)
        second = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return first, second, weights(model)


def own_scaling(model: nn.Module, optimizer: Any) -> Any:
    backward(model, 0)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad.mul_(1 + index % 3)
        parameter.grad.div_(2)
    optimizer.step()
    return weights(model)


def scaler(model: nn.Module, optimizer: Any) -> Any:
    """A GradScaler of the user's own, with an overflow in the second step."""
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    for number in range(4):
        loss = model(data(number)).square().mean()
        losses.append(float(loss.detach()))
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, scaler.get_scale(), weights(model)


@pytest.mark.parametrize(
    "program",
    [clear_by_the_model, clear_one_by_one, clear_in_place, clear_some, no_clearing, clip_then_add, clip_part,
     own_scaling, scaler],
)  # fmt: skip
def test_gradients_after_a_step_are_the_users(ranks: Any, world: tuple[int, str, int], program: Any) -> None:
    compare(ranks, world, program)


def unused_with_zeros(model: nn.Module, optimizer: Any) -> Any:
    for number in range(4):
        model.depth = 3 if number == 0 else 1
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return weights(model)


class Shortened(Net):
    depth = 3

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.last(x)


def test_zeros_instead_of_none_keep_unused_parameters_decaying(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, unused_with_zeros, Shortened, sgd)


def own_gradients(model: nn.Module, optimizer: Any) -> Any:
    """Reads, keeps, replaces: where one rank holds all of it."""
    backward(model, 0)
    kept = [parameter.grad for parameter in model.parameters()]
    before = [grad.clone() for grad in kept]
    model.blocks[0].up.weight.grad = torch.full((13, 7), 0.25)
    model.last.bias.grad += 1.0
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    same = [bool((grad == value).all()) for grad, value in zip(kept, before, strict=True)]
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    optimizer.step()
    return same[3:], largest, weights(model)


def several_at_once(model: nn.Module, optimizer: Any) -> Any:
    """Gradients of one unit that are all held while each is written to."""
    backward(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    torch._foreach_add_(gradients, 0.1)
    torch._foreach_clamp_max_(gradients, 0.2)
    norm = model.blocks[0].norm
    norm.weight.grad.add_(norm.bias.grad)
    norm.bias.grad.lerp_(norm.weight.grad, 0.3)
    optimizer.step()
    return weights(model)


def test_gradients_that_are_held_together_keep_what_is_written_to_each(ranks: Any, world: tuple[int, str, int]) -> None:
    if world in ALONE:
        compare(ranks, world, several_at_once)


def test_a_gradient_that_is_kept_is_not_overwritten(ranks: Any, world: tuple[int, str, int]) -> None:
    if world in ALONE:
        compare(ranks, world, own_gradients)


def before_shard(model: nn.Module, optimizer: Any) -> Any:
    step(model, optimizer)
    return weights(model)


def with_gradients() -> nn.Module:
    model = Net()
    model(data(9)).square().mean().backward()
    return model


def test_gradients_from_before_shard_are_added_to(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, before_shard, with_gradients, adamw)
