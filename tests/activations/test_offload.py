"""Where activations are between forward and backward: counted in bytes, and by what is still alive."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

import unbounded
from tests.activations.models import WIDTH, Frozen, Stack, WithMask, assert_same, gradients, make, tokens
from unbounded.activations.offload import movers
from unbounded.observe import trace

ROWS, LENGTH, DEPTH = 3, 64, 6
INPUT = ROWS * LENGTH * WIDTH * 4  # 9216 bytes: the input of a block


class Watch:
    """Follows the input of every block."""

    def __init__(self, model: Stack) -> None:
        self.inputs: list[TensorWeakRef] = []
        for block in model.blocks:
            block.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.inputs.append(TensorWeakRef(args[0]))

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.inputs)


class Saved:
    """Counts the bytes of tensors that autograd saves, by storage, while it is entered."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage.nbytes()
        return tensor


def moved() -> tuple[int, int]:
    totals = trace.lane_totals()
    return totals["device-to-host"].bytes, totals["host-to-device"].bytes


def deep(kind: type[Stack]) -> Stack:
    torch.manual_seed(1)
    return kind(DEPTH)


@pytest.mark.parametrize(("policy", "alive"), [("keep", DEPTH), ("recompute", DEPTH), ("host", 0)])
def test_inputs_of_blocks_live_on_until_the_backward_unless_they_are_on_the_host(policy: str, alive: int) -> None:
    model = deep(Stack)
    watch = Watch(model)
    unbounded.checkpoint_activations(model, policy)
    loss = model(tokens(rows=ROWS, length=LENGTH))
    assert len(watch.inputs) == DEPTH
    assert watch.alive() == alive
    loss.backward()
    assert watch.alive() == 0


def test_the_host_holds_one_input_a_block_and_uses_the_memory_again() -> None:
    model = deep(Stack)
    unbounded.checkpoint_activations(model, "host")
    from unbounded.sharding.device_room import _shelves

    room = _shelves[model].buffers.room
    page = -(-INPUT // 4096) * 4096
    for _ in range(3):
        before = moved()
        loss = model(tokens(rows=ROWS, length=LENGTH))
        assert room.used_bytes == room.arena.used_bytes == DEPTH * page
        assert moved() == (before[0] + DEPTH * INPUT, before[1])
        loss.backward()
        assert moved() == (before[0] + DEPTH * INPUT, before[1] + DEPTH * INPUT)
    first, second = (model(tokens(rows=ROWS, length=LENGTH)) for _ in range(2))
    assert room.used_bytes == 2 * DEPTH * page
    del first, second


def test_a_tensor_that_all_blocks_share_goes_once_and_comes_back_once() -> None:
    model = deep(WithMask)
    expected = gradients(model, tokens(rows=ROWS, length=LENGTH))
    unbounded.checkpoint_activations(model, "host")
    shared = WIDTH + 2 * 4 * WIDTH  # the mask without its repetitions, one byte each, and the two rotary tables
    before = moved()
    loss = model(tokens(rows=ROWS, length=LENGTH))
    model.zero_grad()
    loss.backward()
    out, back = (now - then for now, then in zip(moved(), before, strict=True))
    assert out == DEPTH * INPUT + shared
    assert back == DEPTH * INPUT + shared
    assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)


def test_what_the_user_still_holds_is_not_fetched() -> None:
    model = deep(WithMask)
    unbounded.checkpoint_activations(model, "host")
    held: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: held.append(args[0]))
    loss = model(tokens(rows=ROWS, length=LENGTH))
    before = moved()
    loss.backward()
    assert moved()[1] - before[1] == WIDTH + 2 * 4 * WIDTH  # only the mask and the tables


def test_blocks_without_a_backward_offload_nothing() -> None:
    model = make(Frozen)
    unbounded.checkpoint_activations(model, "host")
    before = moved()
    loss = model(tokens())
    assert moved()[0] - before[0] == 3 * tokens().numel() * WIDTH * 4  # the first block is frozen, and so its input
    before = moved()
    with torch.no_grad():
        model(tokens())
    assert moved() == before
    loss.backward()


def test_inputs_come_back_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model, events = deep(Stack), []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, index=index: events.append(index))
    bring = movers.HostMover.bring

    def note(self: Any, source: Tensor, *, after: Any) -> Any:
        events.append("fetch")
        return bring(self, source, after=after)

    monkeypatch.setattr(movers.HostMover, "bring", note)
    unbounded.checkpoint_activations(model, "host")
    loss = model(tokens(rows=ROWS, length=LENGTH))
    events.clear()
    loss.backward()
    assert events == ["fetch", "fetch", 5, "fetch", 4, "fetch", 3, "fetch", 2, "fetch", 1, 0]


def test_sequences_of_many_lengths_settle_at_the_buffers_of_the_longest() -> None:
    model = deep(Stack)
    unbounded.checkpoint_activations(model, "host")
    from unbounded.sharding.device_room import _shelves

    room, used = _shelves[model].buffers.room, []
    for length in (LENGTH, 40, 60, 37, LENGTH, 33):
        model(tokens(rows=ROWS, length=length)).backward()
        used.append(room.used_bytes)
    assert used == [used[0]] * len(used)


def test_bytes_that_autograd_keeps_follow_the_policy() -> None:
    batch, kept = tokens(rows=ROWS, length=LENGTH), {}
    for policy in ("keep", "recompute", "host"):
        model, saved = deep(Stack), Saved()
        unbounded.checkpoint_activations(model, policy)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            loss = model(batch)
        kept[policy] = sum(saved.storages.values())
        loss.backward()
    assert kept["keep"] > kept["recompute"] + 3 * DEPTH * INPUT
    assert kept["recompute"] == kept["host"] + DEPTH * INPUT


def test_a_lane_of_the_trace_shows_the_copies(tmp_path: Any) -> None:
    model = deep(Stack)
    unbounded.checkpoint_activations(model, "host")
    with unbounded.trace(tmp_path / "trace.json"):
        model(tokens(rows=ROWS, length=LENGTH)).backward()
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"activations"') == 2 * DEPTH
