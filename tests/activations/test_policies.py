"""Policies on models that are not sharded: the bits of the plain model, and nothing is left when they are removed."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.activations.models import (
    ALL,
    WIDTH,
    Changed,
    Hooked,
    Layer,
    Remembered,
    Stack,
    WithDropout,
    assert_same,
    gradients,
    make,
    tokens,
)
from unbounded.errors import PlanError, StateError
from unbounded.sharding.device_room import _shelves

INSIDE = "ignore:blocks that run inside the caller's own checkpoint"
POLICIES = ["keep", "recompute", "host", (("blocks.1", "recompute"), ("blocks.[23]", "host"))]


def state_of(model: nn.Module) -> list[Any]:
    """What an attachment could change."""
    return [
        (name, set(module.__dict__), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]


@pytest.mark.filterwarnings(INSIDE)
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_gives_the_bits_of_the_plain_model(kind: type[Stack], policy: Any) -> None:
    model = make(kind)
    expected = gradients(model, tokens())
    before, keys = state_of(model), list(model.state_dict())
    handle = unbounded.checkpoint_activations(model, policy)
    assert_same(gradients(model, tokens()), expected)
    assert list(model.state_dict()) == keys
    assert_same(gradients(model, tokens()), expected)
    handle.remove()
    assert state_of(model) == before
    assert_same(gradients(model, tokens()), expected)
    assert model not in _shelves or _shelves[model].buffers.room.arena.used_bytes == 0


def trained_with_looks(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers of steps in which the model is switched over between its forward and its backward."""
    found: list[Tensor] = []
    model.blocks[1].batch.eval()
    for number in range(3):
        torch.manual_seed(number)
        model.zero_grad()
        losses = [model(tokens(number))]
        for block in model.blocks:
            block.scale = 0.5 + number
        losses.append(model(tokens(10 + number)))
        last = [block.last for block in model.blocks]
        model.eval()
        model.blocks[0].requires_grad_(False)
        with torch.no_grad():
            found.append(model(tokens(9)))
        sum(losses).backward()
        model.blocks[0].requires_grad_(True)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not any(module.training for module in model.modules())
        model.train()
        found += [buffer.clone() for buffer in model.buffers()]
        assert all(block.last is kept for block, kept in zip(model.blocks, last, strict=True))
        assert {(block.scale, block.runs) for block in model.blocks} == {(0.5 + number, 2 + 2 * number)}
    return found


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_a_block_runs_again_as_it_was_and_its_buffers_change_once(policy: str) -> None:
    plain, model = make(Changed), make(Changed)
    unbounded.checkpoint_activations(model, policy)
    assert_same(trained_with_looks(model), trained_with_looks(plain))


def trained_with_memories(model: nn.Module) -> list[Any]:
    """Gradients of forwards that change what they depend on, and with a hook that is gone before the backward."""
    found: list[Any] = []
    random.seed(5)
    np.random.seed(5)
    for number in range(4):
        model.zero_grad()
        hook = model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        losses = [model(tokens(number)), model(tokens(number + 10))]
        hook.remove()
        sum(losses).backward()
        found += [p.grad.clone() for p in model.parameters()]
        found += [torch.tensor([*block.log, block.counts["runs"], *block.inner["runs"]]) for block in model.blocks]
        found += [block.carried.detach() for block in model.blocks] + [block.trace.clone() for block in model.blocks]
    return [*found, torch.tensor([random.random(), np.random.rand(), model.blocks[0].drawn.random()])]


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_a_block_runs_again_with_what_it_remembered_and_drew(policy: str) -> None:
    plain, model = make(Remembered), make(Remembered)
    unbounded.checkpoint_activations(model, policy)
    assert_same(trained_with_memories(model), trained_with_memories(plain))


def test_what_a_block_remembers_does_not_keep_the_graphs_of_earlier_forwards() -> None:
    class Mark:
        pass

    model = make(Remembered)
    unbounded.checkpoint_activations(model, "recompute")
    model(tokens())
    mark = Mark()
    model.blocks[0].carried.grad_fn.metadata["mark"] = mark
    gone = weakref.ref(mark)
    del mark
    assert gone() is not None
    losses = [model(tokens(number)) for number in range(2)]
    assert gone() is None
    sum(losses).backward()


def test_a_block_that_begins_to_draw_from_python_later_is_noticed() -> None:
    model = make(Stack)
    unbounded.checkpoint_activations(model, "recompute")
    gradients(model, tokens())
    gradients(model, tokens())
    model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0] * random.random(),))
    for _ in range(13):
        gradients(model, tokens())
    with pytest.warns(UserWarning, match=r"block 'blocks.2', or another thread .* up to 15 runs before"):
        gradients(model, tokens())
    random.seed(1)
    found = gradients(model, tokens())
    unbounded.checkpoint_activations(model, "keep")
    random.seed(1)
    assert_same(found, gradients(model, tokens()))


def test_a_large_buffer_that_is_changed_later_is_an_error() -> None:
    model = make(Changed)
    unbounded.checkpoint_activations(model, "recompute")
    gradients(model, tokens())

    def change(*_: Any) -> None:
        model.blocks[2].table.add_(1)

    handle = model.blocks[2].register_forward_pre_hook(change)
    with pytest.raises(StateError, match=r"block 'blocks.2' has begun to change its tensor 'table'.* policy \"keep\""):
        model(tokens())
    handle.remove()
    gradients(model, tokens())


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_blocks_run_again_in_the_backward_and_only_those_of_the_policy(policy: str) -> None:
    model, runs = make(Stack), [0] * 4
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    unbounded.checkpoint_activations(model, (("blocks.0", policy), ("blocks.2", policy)))
    gradients(model, tokens())
    assert runs == [2, 1, 2, 1]


@pytest.mark.parametrize("kind", ["CheckpointedAround", "CheckpointedAroundReentrant"])
@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_blocks_that_the_user_checkpoints_are_not_recomputed_twice(kind: str, policy: str) -> None:
    model, runs = make(next(one for one in ALL if one.__name__ == kind)), []
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: runs.append(1))
    unbounded.checkpoint_activations(model, policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(model, tokens())
    assert len(runs) == 2 * len(model.blocks)
    told = "are left to it, with their inputs on the device" in " ".join(str(warning.message) for warning in caught)
    assert told == (policy == "host")


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_autocast_is_the_same_when_a_block_runs_again(policy: str) -> None:
    model = make(Stack)

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens())
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run()
    assert not torch.equal(expected[0], gradients(model, tokens())[0])
    unbounded.checkpoint_activations(model, policy)
    assert_same(run(), expected)


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_several_forwards_may_come_before_a_backward(policy: str) -> None:
    model = make(Stack)
    expected = [gradients(model, tokens(seed)) for seed in range(3)]
    unbounded.checkpoint_activations(model, policy)
    model.zero_grad()
    losses = [model(tokens(seed)) for seed in range(3)]
    for seed in (1, 0, 2):  # not in the order of the forwards
        model.zero_grad()
        losses[seed].backward()
        assert_same([losses[seed].detach(), *(p.grad for p in model.parameters())], expected[seed])


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_a_graph_that_is_retained_gives_its_gradients_again(policy: str) -> None:
    model = make(WithDropout)
    expected = gradients(model, tokens())
    unbounded.checkpoint_activations(model, policy)
    torch.manual_seed(2)
    loss = model(tokens())
    for keep in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_removed_between_forward_and_backward_the_backward_still_works(policy: str) -> None:
    model = make(Hooked)
    expected = gradients(model, tokens())
    handle = unbounded.checkpoint_activations(model, policy)
    model.zero_grad()
    loss = model(tokens())
    handle.remove()
    loss.backward()
    assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_a_block_that_the_user_replaces_takes_its_policy_along(policy: str) -> None:
    plain, model = make(Stack), make(Stack)
    handle = unbounded.checkpoint_activations(model, policy, tiled="*.up")
    torch.manual_seed(5)
    plain.blocks[1], plain.blocks[2].up = Stack.block(), nn.Linear(WIDTH, 2 * WIDTH)
    torch.manual_seed(5)
    model.blocks[1], model.blocks[2].up = Stack.block(), nn.Linear(WIDTH, 2 * WIDTH)
    expected = gradients(plain, tokens())
    assert_same(gradients(model, tokens()), expected)
    handle.remove()
    assert_same(gradients(model, tokens()), expected)


def test_an_exception_in_a_block_leaves_no_trace() -> None:
    model = make(Stack)
    expected = gradients(model, tokens())
    unbounded.checkpoint_activations(model, "host")

    def fail(*_: Any) -> None:
        raise ValueError("deliberate failure")

    for _ in range(2):
        hook = model.blocks[2].down.register_forward_hook(fail)
        with pytest.raises(ValueError, match="deliberate"):
            model(tokens())
        hook.remove()
    assert_same(gradients(model, tokens()), expected)
    gc.collect()
    assert _shelves[model].buffers.room.used_bytes == 4 * 4096  # a page for each of the four blocks


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_copies_and_pickles_of_a_model_are_plain(policy: str) -> None:
    model = make(Stack)
    expected = gradients(model, tokens())
    unbounded.checkpoint_activations(model, policy, blocks="blocks.*")
    for other in (copy.deepcopy(model.blocks), pickle.loads(pickle.dumps(model.blocks))):
        assert all("_compiled_call_impl" not in block.__dict__ for block in other)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(gradients(other, tokens()), expected)


def test_named_blocks_may_be_any_submodules() -> None:
    model = make(Stack)
    expected = gradients(model, tokens())
    handle = unbounded.checkpoint_activations(model, "host", blocks=["head", model.blocks[1]])
    assert repr(handle) == "Activations(host: 2 blocks)"
    assert_same(gradients(model, tokens()), expected)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def test_a_model_without_blocks_is_told_how_to_name_some() -> None:
    with pytest.raises(PlanError, match=r"the model has no repeated blocks to checkpoint. Name its blocks with blocks"):
        unbounded.checkpoint_activations(Single())
    unbounded.checkpoint_activations(Single(), blocks="layer")


def test_a_block_has_one_policy() -> None:
    model = make(Stack)
    handle = unbounded.checkpoint_activations(model, (("blocks.0", "recompute"),))
    with pytest.raises(
        PlanError, match=r"block 'blocks.0' already has the activation policy 'recompute'. First call remove"
    ):
        unbounded.checkpoint_activations(model, "host")
    unbounded.checkpoint_activations(model, (("blocks.[1-3]", "host"),))
    handle.remove()
    unbounded.checkpoint_activations(model, (("blocks.0", "host"),))


class InPlace(Stack):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x * 1.0)


def test_an_input_changed_in_place_is_an_error() -> None:
    model = make(InPlace)
    model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].add_(1.0),))
    unbounded.checkpoint_activations(model, "host")
    with pytest.raises(StateError, match=r"an input of block 'blocks.1' \(shape \(2, 5, 12\)\) was changed in place"):
        model(tokens())


@pytest.mark.every_second
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", ["recompute", "host"])
@pytest.mark.parametrize("order", ["compiled first", "compiled later", "wrapped", "whole"])
def test_compiled_blocks_and_models_take_policies(policy: str, backend: str, order: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, runs = make(Stack), []
    expected = gradients(model, tokens())
    if order == "compiled later":
        unbounded.checkpoint_activations(model, policy)
    if order == "wrapped":
        model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    elif order != "whole":
        for block in model.blocks:
            block.compile(backend=backend)
    if order != "compiled later":
        handle = unbounded.checkpoint_activations(model, policy)
        assert len(handle.blocks) == 4
    if order == "whole":
        model.compile(backend=backend)
    for _ in range(3):
        assert_same(gradients(model, tokens()), expected)
    if order != "whole":  # there, every block breaks the graph
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    torch._dynamo.reset()
    gradients(model, tokens())
    assert len(runs) == 2 * len(model.blocks)
    torch._dynamo.reset()


def test_evaluation_neither_recomputes_nor_offloads() -> None:
    model = make(WithDropout).eval()
    expected = model(tokens())
    unbounded.checkpoint_activations(model, "host")
    with torch.no_grad():
        assert torch.equal(model(tokens()), expected)
    with torch.inference_mode():
        assert torch.equal(model(tokens()), expected)
    assert _shelves[model].buffers.room.arena.used_bytes == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(gradients(model.train(), tokens()), gradients(make(WithDropout), tokens()))
