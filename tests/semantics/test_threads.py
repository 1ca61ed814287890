"""Other threads that look at a model, or use it, while it trains."""

from __future__ import annotations

import _thread
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.semantics.programs import ALONE, PLANS, adamw, compare, data, make, step, weights
from unbounded.errors import StateError
from unbounded.zero.passes import turns

NUM_STEPS = 12


def read_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        float(parameter.detach().sum())
        float(parameter.norm())


def read_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None:
            float(gradient.norm())
            float(gradient.abs().max())


def take_state_dict(model: nn.Module) -> None:
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        assert bool(model(data()).isfinite().all())


def run_backward(loss: Tensor, errors: list[Exception], has_ended: threading.Event) -> None:
    try:
        loss.backward()
    except Exception as error:
        errors.append(error)
    has_ended.set()


def show_values(model: nn.Module) -> None:
    with unbounded.full_params(model):
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def save(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unbounded.save(Path(folder) / "checkpoint", model)


LOOKS = [read_weights, read_gradients, take_state_dict, evaluate, show_values, save]


def watched(look: Callable[[nn.Module], None], model: nn.Module, optimizer: Any) -> Any:
    """Training while another thread looks at the sharded model again and again."""
    is_over, failures, num_looks = threading.Event(), [], 0

    def watch() -> None:
        nonlocal num_looks
        try:
            while not is_over.is_set():
                look(model)
                num_looks += 1
        except Exception as error:
            failures.append(repr(error))

    thread = threading.Thread(target=watch)
    if hasattr(optimizer, "engine"):
        thread.start()
    losses = [step(model, optimizer, number) for number in range(NUM_STEPS)]
    is_over.set()
    if hasattr(optimizer, "engine"):
        thread.join()
        assert num_looks
    return losses, weights(model), failures


@pytest.mark.parametrize("world", ALONE, ids=str)
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_looks_of_another_thread_change_nothing(ranks: Any, world: tuple[int, str, int], look: Any) -> None:
    compare(ranks, world, partial(watched, look))


def each_its_own(model: nn.Module, optimizer: Any) -> Any:
    """Three threads, each with a forward and a backward of its own, in every step."""
    losses: dict[int, float] = {}

    def train(number: int) -> None:
        loss = model(data(number)).square().mean()
        loss.backward()
        losses[number] = float(loss.detach())

    for first in range(0, 12, 3):
        threads = [threading.Thread(target=train, args=(first + index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        optimizer.zero_grad()
    return dict(sorted(losses.items())), weights(model)


@pytest.mark.parametrize("world", ALONE, ids=str)
def test_backwards_of_several_threads_add_up(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, each_its_own)


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_thread_for_which_a_pass_waits_is_told_and_training_goes_on(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.05)
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    told: list[str] = []

    def ask(look: Callable[[], Any]) -> None:
        try:
            look()
        except StateError as error:
            told.append(str(error))

    def wait_for_it(*_: Any) -> None:
        for look in (lambda: model.blocks[2].up.weight.sum(), lambda: model(data())):
            thread = threading.Thread(target=ask, args=(look,))
            thread.start()
            thread.join()

    handle = model.blocks[1].register_forward_pre_hook(wait_for_it)
    losses = [step(model, optimizer)]
    handle.remove()
    losses += [step(model, optimizer, number) for number in range(1, 3)]
    plain = make()
    reference = adamw(plain)
    assert losses == pytest.approx([step(plain, reference, number) for number in range(3)])
    assert len(told) == 2
    assert all("inside a forward of this sharded model" in message for message in told)


@pytest.mark.parametrize("in_torchs", [False, True], ids=["its own", "torch's thread"])
@pytest.mark.parametrize("plan", ["device", "host"])
def test_a_backward_that_runs_blocks_again_waits_for_another_threads_forward(plan: str, in_torchs: bool) -> None:
    """Without that, a block that runs again would find weights without a graph, which are for the other's forward.

    On a GPU a backward runs in a thread that Python knows nothing of.
    """
    plain, model = make(), make()
    model, _ = unbounded.shard(model, adamw(model), {**PLANS[plan], "activations": "recompute"})
    is_inside, is_again, is_there, is_over = (threading.Event() for _ in range(4))
    other = threading.Thread(target=lambda: evaluate(model))

    def in_first(*_: Any) -> None:
        if threading.current_thread() is other:
            is_inside.set()
            is_again.wait(0.3)

    def in_second(*_: Any) -> None:
        if threading.current_thread() is other:
            is_there.set()
            is_over.wait(0.3)
        elif torch._C._current_graph_task_id() != -1:
            is_again.set()
            assert is_there.wait(30)

    model.blocks[0].norm.register_forward_hook(in_first)
    model.blocks[1].norm.register_forward_hook(in_second)
    loss = model(data()).square().mean()
    other.start()
    assert is_inside.wait(30)
    if in_torchs:
        has_ended, errors = threading.Event(), []
        _thread.start_new_thread(run_backward, (loss, errors, has_ended))
        assert has_ended.wait(30)
        assert not errors
    else:
        loss.backward()
    is_over.set()
    other.join()
    plain(data()).square().mean().backward()
    for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.clone(), expected.grad)
