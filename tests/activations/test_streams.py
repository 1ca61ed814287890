"""The order of copies on a device whose streams lag as far as they may, played through on the CPU.

A copy happens only when something is ordered after it: what is read or freed too early comes out wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

import unbounded
from tests.activations.models import ALL, Stack, assert_same, gradients, make, tokens
from unbounded.activations.offload import shelf
from unbounded.errors import StateError
from unbounded.sharding.device_room import _shelves


class Late:
    """An event; the copies it stands for are made when somebody waits for it."""

    def __init__(self, *copies: Callable[[], None], after: tuple[Any, ...] = ()) -> None:
        self.copies, self.after = list(copies), after

    def happen(self) -> None:
        for event in self.after:
            event.happen()
        while self.copies:
            self.copies.pop(0)()

    def query(self) -> bool:
        return not self.copies

    synchronize = happen


class Coming:
    def __init__(self, target: Tensor, event: Late) -> None:
        self.target, self.event = target, event

    def order_stream(self) -> Tensor:
        self.event.happen()
        return self.target


class LateMover:
    """Copies as late as the events allow; what nobody waits for never happens."""

    def __init__(self) -> None:
        self.sent: dict[Late, Tensor] = {}
        self.log: list[str] = []

    def mark(self) -> Late:
        return Late()

    def send(self, source: Tensor, target: Tensor, *, after: tuple[Any, ...]) -> Late:
        self.log.append("send")
        event = Late(lambda: target.copy_(source), after=after)
        self.sent[event] = source
        return event

    def bring(self, source: Tensor, *, after: Any) -> Coming:
        self.log.append("bring")
        target = torch.full_like(source, torch.nan) if source.is_floating_point() else torch.zeros_like(source)
        return Coming(target, Late(lambda: target.copy_(source), after=(after,)))

    def give_up(self, event: Late) -> None:
        self.log.append("give up")
        event.happen()
        del self.sent[event]


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> LateMover:
    made = LateMover()
    monkeypatch.setattr(shelf, "make_mover", lambda device: made)
    return made


@pytest.mark.filterwarnings("ignore:blocks that run inside the caller's own checkpoint")
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_copies_that_come_late_change_nothing(mover: LateMover, kind: type[Stack]) -> None:
    model = make(kind)
    expected = [gradients(model, tokens(seed)) for seed in range(4)]
    unbounded.checkpoint_activations(model, "host")
    for seed in range(4):
        assert_same(gradients(model, tokens(seed)), expected[seed])


def test_the_device_keeps_the_inputs_of_the_last_two_blocks_and_does_not_fetch_those(mover: LateMover) -> None:
    torch.manual_seed(1)
    model = Stack(depth=6)
    unbounded.checkpoint_activations(model, "host")
    loss = model(tokens())
    assert mover.log == ["send"] * 3 + ["give up"] + ["send", "give up"] * 3
    mover.log.clear()
    loss.backward()
    assert mover.log == ["bring"] * 4


def test_inputs_die_when_they_are_given_up(mover: LateMover) -> None:
    torch.manual_seed(1)
    model, inputs = Stack(depth=6), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(TensorWeakRef(args[0])))
    unbounded.checkpoint_activations(model, "host")
    loss = model(tokens())
    gc.collect()
    parcels = [parcel for parcel in gc.get_objects() if type(parcel) is shelf.Parcel]  # asking a dead proxy raises
    places = sorted(parcel.place.value for parcel in parcels)
    assert places == ["away"] * 4 + ["leaving"] * 2
    assert not any(reference() is not None for reference in inputs)
    loss.backward()


def test_buffers_are_written_again_only_after_their_last_use(mover: LateMover) -> None:
    """Graphs that are dropped without a backward leave copies that have not happened yet."""
    model = make(Stack)
    expected = gradients(model, tokens(1))
    unbounded.checkpoint_activations(model, "host")
    for seed in range(3):
        model(tokens(seed + 5))
    assert_same(gradients(model, tokens(1)), expected)
    _shelves[model].buffers.trim()
    assert _shelves[model].buffers.room.arena.used_bytes == 0


def test_an_input_that_is_changed_while_it_leaves_is_found(mover: LateMover) -> None:
    class Careless(Stack):
        def run(self, block: Any, x: Tensor) -> Tensor:
            before = x * 1.0
            after = block(before)
            before.mul_(2.0)
            return after

    model = make(Careless)
    unbounded.checkpoint_activations(model, "host")
    with pytest.raises(StateError, match=r"an input of block 'blocks.0' \(shape \(2, 5, 12\)\) was changed in place"):
        model(tokens())
