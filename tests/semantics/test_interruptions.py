"""Exceptions in the middle of a pass, of a step and of the engine's own work: whatever was begun is ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.semantics.programs import PLANS, WORLDS, adamw, compare, data, make, step, weights
from unbounded.checkpoint import saving
from unbounded.held_interrupts import HeldBack, deliver, wait
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.reduction.agreement import GradientAgreement


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def broken_backward(model: nn.Module, optimizer: Any) -> Any:
    """A backward ends in an exception, and what follows is no forward but other backwards, reads and steps."""
    optimizer.zero_grad()
    first = model(Breaking.apply(data().requires_grad_())).square().mean()
    second = model(data(1)).square().mean()
    with pytest.raises(ZeroDivisionError):
        first.backward()
    optimizer.zero_grad()
    model.blocks[0].requires_grad_(True)  # refused inside a backward
    model.blocks[0].requires_grad_(False)
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return weights(model), [step(model, optimizer, number) for number in range(3, 5)], weights(model)


def half_frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.blocks[0].requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_backward_that_broke_off_is_over(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, broken_backward, optimizer=half_frozen)


def broken_hook(model: nn.Module, optimizer: Any) -> Any:
    """A user's hook on a gradient raises: on some used parameter, and on the last one that is used."""
    for parameter in (model.blocks[1].up.weight, model.first.bias):
        handle = parameter.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(data()).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
    return [step(model, optimizer, number) for number in range(2)], weights(model)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_hook_that_raised_leaves_nothing_behind(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, broken_hook)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    plain = getattr(owner, name)

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, plain)
        raise ZeroDivisionError

    monkeypatch.setattr(owner, name, fail)


def test_a_forward_whose_end_failed_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make()
    model, optimizer = unbounded.shard(make(), None, PLANS["host"])
    for _ in range(2):  # of the root, and of a block
        fail_once(monkeypatch, Writes, "find")
        with pytest.raises(ZeroDivisionError):
            model(data())
        assert optimizer is None
        assert all(type(p).__name__ == "ManagedParameter" for p in model.parameters())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(model(data()), plain(data()))


def test_a_step_that_failed_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS["host"])
    model(data()).square().mean().backward()
    fail_once(monkeypatch, GradientAgreement, "finish")
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.engine.phases._text is None  # what follows belongs to no phase
    optimizer.step()
    optimizer.zero_grad()
    fail_once(monkeypatch, GradientArray, "store")
    model(data()).square().mean().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(unit.gradient.store.num_changes % 2 == 0 for unit in optimizer.engine.units)


class Interrupting:
    """A signal at the `after`th call that the main thread makes inside the library."""

    def __init__(self, after: int, number: int) -> None:
        self._left, self._number = after, number

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and f"{os.sep}unbounded{os.sep}" in frame.f_code.co_filename:
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                signal.raise_signal(self._number)


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """A process in the background may have begun with a SIGINT that is ignored; a program's own handlers raise too."""
    before = [signal.signal(number, signal.default_int_handler) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("plan", list(PLANS))
def test_after_a_signal_at_any_moment_training_goes_on(plan: str) -> None:
    plain, model = make(), make()
    start = weights(plain)
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    step(model, optimizer)
    for after in range(1, 2000, 97):
        sys.setprofile(Interrupting(after, NUMBERS[after % 3]))
        try:
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                while True:
                    step(model, optimizer)
        finally:
            sys.setprofile(None)
        assert {signal.getsignal(number) for number in NUMBERS} == {signal.default_int_handler}
        optimizer.zero_grad()
        step(model, optimizer)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model.load_state_dict(start)
    for each in (plain, model):
        each(data()).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.clone(), other.grad)


def wait_with_ctrl_c() -> None:
    with HeldBack():
        signal.raise_signal(signal.SIGINT)
        wait(threading.Event())


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_a_wait_and_reaches_the_users_handler() -> None:
    with pytest.raises(KeyboardInterrupt):
        wait_with_ctrl_c()
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    with HeldBack(), HeldBack():
        signal.raise_signal(signal.SIGINT)
        assert not seen
        deliver()
        assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT] * 2
    with pytest.raises(KeyboardInterrupt), HeldBack():
        list(map(signal.raise_signal, NUMBERS))
    assert seen == [signal.SIGINT] * 3  # what one handler raises keeps no other from being called


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("wait_for_it", [True, False])
def test_ctrl_c_between_two_parts_of_a_save_leaves_nothing_half_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for_it: bool
) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS["host"])
    plain = saving.Save.__init__

    def strike(handle: saving.Save) -> None:
        monkeypatch.setattr(saving.Save, "__init__", plain)
        signal.raise_signal(signal.SIGINT)
        plain(handle)

    monkeypatch.setattr(saving.Save, "__init__", strike)
    with pytest.raises(KeyboardInterrupt):
        unbounded.save(tmp_path / "last", model, optimizer, wait=wait_for_it)
    unbounded.save(tmp_path / "last", model, optimizer)  # its lock is free
    step(model, optimizer)  # and no update waits for it


def finish_with_ctrl_c(model: nn.Module) -> None:
    with HeldBack():
        signal.raise_signal(signal.SIGINT)
        saving.finish_pending(model)


@pytest.mark.usefixtures("interrupts")
def test_a_save_whose_wait_was_interrupted_is_still_waited_for() -> None:
    model = make()
    saving._pending[model] = saving.Save()
    with pytest.raises(KeyboardInterrupt):
        finish_with_ctrl_c(model)
    assert model in saving._pending
