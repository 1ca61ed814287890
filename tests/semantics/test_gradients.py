"""Gradients between passes: what is read, kept, cleared, replaced or scaled, and when."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.semantics.programs import ALONE, WORLDS, Net, adamw, compare, compare_in, data, run_sharded, step, weights

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


def odd_scaling(model: nn.Module, optimizer: Any) -> Any:
    """Factors by name, by rounded division, and of zero, which leaves what is not finite undefined."""
    backward(model, 0)
    first, last = model.first.weight.grad, model.last.weight.grad
    seen = [first.norm(dtype=torch.float64), torch.linalg.vector_norm(last, dtype=torch.float64)]
    with unbounded.full_params(model) if hasattr(optimizer, "engine") else contextlib.nullcontext():
        model.first.weight.grad.mul_(other=2.0)
        model.last.weight.grad.div_(0.01, rounding_mode="floor")
    model.first.bias.grad.mul_(0.0)
    model.last.bias.grad.mul_(float("inf")).mul_(0.0)
    model.blocks[0].up.bias.grad.div_(0.0)
    optimizer.step()
    return seen, {name: value.nan_to_num(7.0, 8.0, 9.0) for name, value in weights(model).items()}


def scaling_by_tensors(model: nn.Module, optimizer: Any) -> Any:
    """Factors that the loop changes before the step, in other dtypes and shapes, a parameter, and two that torch
    refuses.
    """
    factor, third = torch.tensor(0.5), torch.tensor(3.0, dtype=torch.bfloat16)
    tiny = torch.tensor(1e-4, dtype=torch.float16)
    for number in range(3):
        backward(model, number)
        for parameter in model.parameters():
            parameter.grad.mul_(factor).div_(third).mul_(tiny)
            parameter.grad /= torch.tensor([1e-4])
        for refused in (torch.tensor(1j), torch.ones(1, 1, 1)):
            with pytest.raises(RuntimeError):
                model.first.weight.grad.mul_(refused)
        factor += 1
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def scaler(model: nn.Module, optimizer: Any) -> Any:
    """The user's own GradScaler, with an overflow in the second step."""
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


def norms_of_a_list(model: nn.Module, optimizer: Any) -> Any:
    """The gradients are in the user's own list, which outlives their clearing."""
    norms = []
    for number in range(3):
        backward(model, number)
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norms[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return norms, weights(model)


def all_of_these(model: nn.Module, optimizer: Any) -> Any:
    """All of these that are also exact in 16 bits, one after the other."""
    programs = [norms_of_a_list, clear_by_the_model, clear_one_by_one, clear_in_place, clear_some, no_clearing]
    return [program(model, optimizer) for program in programs]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_every_plan_gives_what_one_device_gives(
    ranks: Any, world: tuple[int, str, int], precision: str
) -> None:
    compare_in(precision, ranks, world, all_of_these)


@pytest.mark.parametrize(
    "program",
    [clear_by_the_model, clear_one_by_one, clear_in_place, clear_some, no_clearing, clip_then_add, clip_part,
     own_scaling, odd_scaling, scaling_by_tensors, scaler, norms_of_a_list],
)  # fmt: skip
def test_gradients_after_a_step_are_the_users(ranks: Any, world: tuple[int, str, int], program: Any) -> None:
    compare(ranks, world, program)


def cleared_between_backwards(model: nn.Module, optimizer: Any) -> Any:
    """Clearing takes all that backwards have made so far, even if adding up the last one takes a while."""
    _add_late(optimizer)
    for number in range(2):
        backward(model, number)
        model.first.bias.grad = None
        backward(model, number + 10)
        model.blocks[0].up.bias.grad.zero_()
        backward(model, number + 20)
        model.blocks[1].up.bias.grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def norms_between_backwards(model: nn.Module, optimizer: Any) -> Any:
    """Norms include all backwards so far, in the same way."""
    _add_late(optimizer)
    seen = []
    for number in range(2):
        for part in range(3):
            backward(model, 10 * number + part)
            seen.append(model.last.weight.grad.norm())
            seen.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(model)


def _add_late(optimizer: Any) -> None:
    """Makes every addition to a gradient of a sharded model wait a little first."""

    def add(add: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        add(*args, **kwargs)

    for unit in optimizer.engine.units if hasattr(optimizer, "engine") else ():
        unit.gradient.add = partial(add, unit.gradient.add)


def _num_dtypes(rank: int, world_size: int, plan: str, stage: int, precision: str) -> list[int]:
    extra = {"precision": precision, "loss_scale": 1, "loss_scale_window": 0}
    return run_sharded(rank, world_size, late_dtypes, plan, stage, Net, adamw, extra)  # type: ignore[no-any-return]


def late_dtypes(model: nn.Module, optimizer: Any) -> Any:
    """torch's clipping goes over gradients by dtype, so these must be the same on all ranks, or norms get mixed up."""
    _add_late(optimizer)
    seen: list[int] = []
    for number in range(2):
        for index in range(2):
            backward(model, 10 * index + number)
            seen.append(len({parameter.grad.dtype for parameter in model.parameters()}))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_that_become_wider_while_they_are_added_up_have_one_dtype(
    ranks: Any, world: tuple[int, str, int], precision: str
) -> None:
    world_size, plan, stage = world
    assert ranks(world_size, _num_dtypes, plan, stage, precision) == [[1, 1, 1, 1]] * world_size


@pytest.mark.parametrize("program", [cleared_between_backwards, norms_between_backwards])
def test_whatever_is_done_to_gradients_waits_for_what_is_added(
    ranks: Any, world: tuple[int, str, int], program: Any
) -> None:
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
    """Reads, keeps and replaces gradients, where one rank holds all of them."""
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


def held_memory(model: nn.Module, optimizer: Any) -> Any:
    """Tensors over the memory of gradients, kept and written to across clipping, backwards, steps and clearing."""
    backward(model, 0)
    held = [parameter.grad.data for parameter in model.parameters()]
    seen: list[Any] = []

    def look() -> None:
        seen.append([value.clone() for value in held])
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    look()
    for value in held:
        value.mul_(3)
    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    model.last.weight.grad.mul_(0.5)
    look()
    row = model.blocks[0].up.weight.grad[0]
    backward(model, 1)
    row.add_(1.0)
    look()
    optimizer.step()
    for value in held:
        value.add_(0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    held[3].add_(0.5)
    look()
    backward(model, 2)
    look()
    model.first.bias.grad = None
    model.last.bias.grad = torch.ones(3)
    look()
    optimizer.step()
    optimizer.zero_grad()
    look()
    return seen, weights(model)


def given_memory(model: nn.Module, optimizer: Any) -> Any:
    """A tensor that was made the gradient is the gradient, for whoever still holds it."""
    given = [torch.full_like(parameter, 0.01) for parameter in model.parameters()]
    for parameter, value in zip(model.parameters(), given, strict=True):
        parameter.grad = value
    given[0].mul_(2.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    given[1].mul_(3.0)
    backward(model)
    optimizer.step()
    kept = [value.clone() for value in given]
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    return norm, kept, given, weights(model)


def other_data(model: nn.Module, optimizer: Any) -> Any:
    """`grad.data = x` in place of what was there, which whoever held it keeps; also after the gradient was cleared."""
    backward(model)
    grads = [parameter.grad for parameter in model.parameters()]
    held = [grad.data for grad in grads]
    given = [torch.full_like(grad, 0.01) for grad in grads]
    for grad, value in zip(grads, given, strict=True):
        grad.data = value
    grads[0].data *= 3.0
    grads[1].set_(held[1] * 2.0)
    given[2].mul_(5.0)
    seen = [[parameter.grad.clone() for parameter in model.parameters()], [value.clone() for value in held]]
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    grads[3].data = torch.ones_like(grads[3])
    return seen, grads[3].clone(), weights(model)


@pytest.mark.parametrize("program", [held_memory, given_memory, other_data])
def test_memory_of_gradients_that_is_held_stays_that_of_the_gradients(
    ranks: Any, world: tuple[int, str, int], program: Any
) -> None:
    if world in ALONE or world[2] == 0:
        compare(ranks, world, program)


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


def inside_full_params(model: nn.Module, optimizer: Any) -> Any:
    """Gradients of which ranks have parts are whole where parameters are: read, changed in place, replaced, cleared."""
    seen: list[Any] = []
    for number in range(3):
        backward(model, number)
        if number == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with unbounded.full_params(model) if hasattr(optimizer, "engine") else contextlib.nullcontext():
            seen.append([parameter.grad.clone() for parameter in model.parameters()])
            for parameter in model.blocks.parameters():
                if parameter.dim() > 1:
                    parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
            model.blocks[0].up.weight.grad.data[0].add_(0.1)
            model.last.bias.grad = torch.full((3,), 0.5)
            model.first.bias.grad = None
            model.blocks[1].norm.weight.grad.mul_(2.0)
            model.blocks[2].up.weight.grad.data /= 2
            model.blocks[2].down.weight.grad.set_(torch.full((7, 13), 0.125))
        backward(model, number + 10)
        optimizer.step()
        with unbounded.full_params(model) if hasattr(optimizer, "engine") else contextlib.nullcontext():
            seen.append(model.last.weight.grad.clone())  # what the step has used is still there
        optimizer.zero_grad()
    return seen, weights(model)


def test_inside_full_params_gradients_are_whole(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, inside_full_params)
