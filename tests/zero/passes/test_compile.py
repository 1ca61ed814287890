"""torch.compile inside and around sharded models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.semantics.programs import Net, compare, data, weights
from tests.zero.training import Run, Task, TinyGPT, assert_parity, train_both, train_ours
from unbounded.zero.setup.assembly import Assembly


class CompiledBlocks(Task):
    """Every block compiled in place, before sharding: the usual way for transformers."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def model(self) -> nn.Module:
        model = TinyGPT(depth=2)
        for block in model.blocks:
            block.compile(backend=self.backend)
        return model


class CompiledWrapped(CompiledBlocks):
    """`torch.compile(block)` makes a module around the block, whose parameters are named _orig_mod."""

    def model(self) -> nn.Module:
        model = TinyGPT(depth=2)
        model.blocks = nn.ModuleList(torch.compile(block, backend=self.backend) for block in model.blocks)
        return model


class CompiledWhole(CompiledBlocks):
    """The whole model is compiled: only the hooks of units inside break the graph."""

    def model(self) -> nn.Module:
        model = TinyGPT(depth=2)
        model.compile(backend=self.backend)
        return model


def train_compiled(rank: int, world_size: int, task: Task, plan: dict[str, Any]) -> tuple[Run, Run, dict[str, int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference, ours = train_both(rank, world_size, task, plan)
    counts = dict(torch._dynamo.utils.counters["stats"])
    torch._dynamo.reset()
    return reference, ours, counts


@pytest.mark.parametrize("kind", [CompiledBlocks, CompiledWrapped, CompiledWhole], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_compiled_models_train_as_in_plain_pytorch(ranks: Any, kind: Any, world_size: int, stage: int) -> None:
    results = ranks(world_size, train_compiled, kind("aot_eager"), {"stage": stage})
    assert_parity([result[:2] for result in results])


@pytest.mark.parametrize(("world_size", "stage", "activations"), [(1, 3, "recompute"), (2, 2, "keep"), (2, 3, "host")])
def test_the_plan_compiles_blocks(ranks: Any, world_size: int, stage: int, activations: str) -> None:
    plan = {"stage": stage, "activations": activations, "compile": "aot_eager"}
    results = ranks(world_size, train_compiled, Task(), plan)
    assert_parity([result[:2] for result in results])
    assert all(result[2]["unique_graphs"] > 0 for result in results)


def hooks_of(model: nn.Module, seen: list[str]) -> list[Any]:
    """On a module inside a block, on a block, and on all modules; one of them changes what passes."""
    inner, hooks = model.blocks[1].norm, torch.nn.modules.module  # type: ignore[index, union-attr]

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_: seen.append(name) or result

    return [
        inner.register_forward_pre_hook(note("before")),
        inner.register_forward_hook(lambda _, given, result: seen.append("after") or 2 * result),
        inner.register_full_backward_pre_hook(note("backward")),
        inner.register_full_backward_hook(note("over")),
        model.blocks[0].register_forward_hook(note("block")),  # type: ignore[index, union-attr]
        hooks.register_module_forward_hook(note("any")),
        hooks.register_module_full_backward_hook(note("any backward")),
    ]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_hooks_that_come_and_go_after_blocks_were_compiled_are_called_as_in_plain_blocks(activations: str) -> None:
    """torch leaves them out without a word."""
    found = []
    for how in (False, "aot_eager"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = TinyGPT()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = unbounded.shard(model, optimizer, {"activations": activations, "compile": how})
        seen: list[str] = []
        losses = []
        for step in range(4):
            hooks = hooks_of(model, seen) if step in (1, 2) else []
            loss = model(torch.arange(12).view(3, 4) + step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            for hook in hooks:
                hook.remove()
        found.append((seen, losses))
    assert found[0][0] == found[1][0]
    assert {"before", "after", "backward", "over", "block", "any", "any backward"} == set(found[0][0])
    assert found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("kind", ["forward", "full_backward", "full_backward_pre"])
def test_a_hook_that_comes_between_a_forward_and_its_backward_changes_no_gradient(kind: str) -> None:
    """What a compiled block has saved is not what the plain one would save when it runs again."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = TinyGPT()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = unbounded.shard(model, optimizer, {"activations": "recompute", "compile": "aot_eager"})
        for step in range(3):
            loss = model(torch.arange(12).view(3, 4) + step).square().mean()
            register = [getattr(block.norm, f"register_{kind}_hook") for block in model.blocks] if hooked else []
            hooks = [add(lambda *_: None) for add in register]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for hook in hooks:
                hook.remove()
        found.append(weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_what_the_plan_compiled_is_plain_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `unshard`, and after a `shard` that failed; what the user has compiled stays."""
    model = TinyGPT()
    model.blocks[1].compile(backend="aot_eager")
    given = [block._compiled_call_impl for block in model.blocks]
    unbounded.shard(model, None, {"compile": "eager"})
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    unbounded.unshard(model)
    assert [block._compiled_call_impl for block in model.blocks] == given
    monkeypatch.setattr(Assembly, "build", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unbounded.shard(model, None, {"compile": "eager"})
    assert [block._compiled_call_impl for block in model.blocks] == given


def test_compile_refuses_what_it_cannot_do() -> None:
    with pytest.raises(unbounded.PlanError, match=r"compile is 'inducter'.*Did you mean 'inductor'"):
        unbounded.shard(TinyGPT(), None, {"compile": "inducter"})
    with pytest.raises(unbounded.PlanError, match=r"compile is 3\. Choose True or False, or the name of a backend"):
        unbounded.shard(TinyGPT(), None, {"compile": 3})
    with pytest.warns(UserWarning, match="compile=True has no effect"):
        unbounded.shard(nn.Linear(3, 3), None, {"compile": True})


def compiled_steps(model: nn.Module, optimizer: Any) -> Any:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [float(train(data(number))) for number in range(3)]
    torch._dynamo.reset()
    return losses, weights(model)


@pytest.mark.every_second
@pytest.mark.parametrize("world", [(1, "host", 3), (2, "device", 1), (2, "disk", 3)], ids=str)
def test_a_compiled_step_with_its_backward_and_update_trains_as_in_plain_pytorch(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    compare(ranks, world, compiled_steps, partial(Net, depth=2))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_sharded_blocks(ranks: Any) -> None:
    results = ranks(1, train_compiled, CompiledBlocks("inductor"), {"stage": 3})
    assert_parity([result[:2] for result in results], tolerance=1e-5)  # different kernels from the eager reference's


def recompiles(rank: int, world_size: int) -> list[int]:
    """How many graphs were compiled after the first step, and after every later step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts: list[int] = []

    class Counting(CompiledBlocks):
        steps = 4

        def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
            counts.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))

    train_ours(rank, world_size, Counting("aot_eager"), {"stage": 3})
    torch._dynamo.reset()
    return counts


def test_nothing_is_compiled_again_after_the_second_step(ranks: Any) -> None:
    for counts in ranks(2, recompiles):
        assert counts[0] > 0
        assert counts[1:] == [counts[1]] * 3
