"""What is passed to a model and what comes back: the caller's own containers, and outputs of every shape."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unbounded
from tests import process
from tests.semantics.programs import PLANS, WORLDS, Net, adamw, compare, data, make, step
from unbounded.ranks import groups

Pair = namedtuple("Pair", "one two")


@dataclass(frozen=True)
class Box:
    items: list[int]
    offset: Tensor


class Filling(Net):
    """Fills whatever it is given."""

    def forward(self, x: Tensor, collected: Any = None, named: Any = None, box: Any = None, nested: Any = None) -> Any:
        x = torch.tanh(self.first(x))
        for index, block in enumerate(self.blocks):
            x = block(x)
            if collected is not None:
                collected.append(x.detach().clone())
                named[index] = x.detach().sum()
                box.items.append(index)
                x = x + box.offset
                nested["deep"][0].append(index)
        return self.last(x)


def fill(model: nn.Module, optimizer: Any) -> Any:
    collected, named, nested = [data(3)], OrderedDict(first=data(4)), {"deep": ([], data(5))}
    box = Box([], torch.ones(1))
    given, inner = collected[0], nested["deep"]
    model(data(), collected, named=named, box=box, nested=nested).sum().backward()
    same = collected[0] is given and nested["deep"] is inner and box.offset.dtype == torch.float32
    return collected, list(named), box.items, nested["deep"][0], same


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_containers_that_a_model_fills_are_the_callers(ranks: Any, world: tuple[int, str, int], precision: str) -> None:
    if precision == "fp32":
        compare(ranks, world, fill, Filling)
        return
    model = make(Filling)
    model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[world[1]], "precision": precision})
    collected, names, items, deep, same = fill(model, optimizer)
    assert len(collected) == 4
    assert collected[0].dtype == torch.float32  # the caller's own, put back
    assert (names, items, deep, same) == (["first", 0, 1, 2], [0, 1, 2], [0, 1, 2], True)


class Chain:
    def __init__(self, value: Any, rest: Any) -> None:
        self.value, self.rest = value, rest


class Many(Net):
    """Returns more than anybody should walk through."""

    def forward(self, x: Tensor, kind: str = "tensor") -> Any:
        y = super().forward(x)
        if kind == "chain":
            for _ in range(30):
                y = Chain(y, y)
            return y
        return {"y": y, **{str(i): i for i in range(500_000)}} if kind == "dict" else y


@pytest.mark.parametrize("kind", ["chain", "dict"])
def test_outputs_are_not_walked_object_by_object(kind: str) -> None:
    """Counted in lines of Python, which do not depend on the machine."""
    import sys

    model, _ = unbounded.shard(make(Many), None, PLANS["host"])
    lines = [0]

    def count(frame: Any, event: str, argument: Any) -> Any:
        lines[0] += "unbounded" in frame.f_code.co_filename
        return count

    sys.settrace(count)
    try:
        model(data(), kind)
    finally:
        sys.settrace(None)
    assert lines[0] < 5_000


def test_a_returned_leaf_collects_no_hooks() -> None:
    leaf = torch.ones(3, requires_grad=True)

    class Returning(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), leaf

    model, _ = unbounded.shard(make(Returning), None)
    for _ in range(5):
        model(data())
    assert not leaf._backward_hooks


@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_model_that_nobody_holds_is_freed_without_the_garbage_collector(plan: str, activations: str) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "activations": activations})
    step(model, optimizer)
    references = [
        weakref.ref(model),
        weakref.ref(optimizer),
        weakref.ref(optimizer.engine),
        weakref.ref(model.blocks[0]),
    ]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert process.is_freed(*references, collects=False)
    finally:
        gc.enable()


@pytest.mark.parametrize("plan", list(PLANS))
def test_weights_that_were_used_outside_the_model_are_kept_by_nobody(plan: str) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    step(model, optimizer)

    def count_after_uses(times: int) -> int:
        for _ in range(times):
            float(sum(p.square().sum() for p in model.parameters()))
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    assert count_after_uses(20) == count_after_uses(2)
    outdated = sum(p.square().sum() for p in model.parameters())
    step(model, optimizer, 1)
    if plan == "device":  # elsewhere a graph outside the model has copies
        with pytest.raises(RuntimeError, match="modified inplace"):
            outdated.backward()


def groups_are_back() -> bool:
    """Whether no model of this job has a set of groups any more; otherwise the next one would make another set."""
    axes = groups._sets.get(dist.group.WORLD, {})
    return not any(one.is_taken for sets in axes.values() for one in sets)


def what_is_left(rank: int, world_size: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Threads and file descriptors after each of several models that came and went, while groups wait for the next one.

    Also the names of the threads that are there at the end.
    """
    left: list[tuple[int, int]] = []
    for plan in 4 * ("disk", "host"):
        model = make()
        model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "stage": 3})
        step(model, optimizer)
        reference = weakref.ref(optimizer.engine)
        del model, optimizer
        process.is_freed(reference)
        process.eventually(groups_are_back)
        limits = {"threads": left[3][0] + 3, "files": left[-2][1]} if len(left) >= 4 else {}  # as the test has them
        left.append(process.settled(**limits))
    return left, sorted(process.threads().values())


def test_models_that_come_and_go_leave_no_threads_and_no_descriptors(ranks: Any) -> None:
    for left, names in ranks(2, what_is_left):
        # The first two make the groups that the others use. A model that left something would do so every time;
        # torch's own threads come and go by how operations fall on them.
        assert left[-1][0] - left[3][0] < len(left) - 4, (left, names)
        for before, after in zip(left[2:], left[4:], strict=False):
            assert after[1] <= before[1], left
