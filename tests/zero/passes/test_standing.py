"""Models whose weights all stay on the device: they are put into the modules once per forward, not block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.semantics.programs import PLANS, Block, Net, Program, adamw, assert_same, data, make, run_plain, weights
from tests.semantics.programs import step as train_step
from unbounded.observe import trace as lanes
from unbounded.observe.lanes import COMPUTE
from unbounded.observe.spans import read_spans
from unbounded.zero.engine import Engine
from unbounded.zero.parameters.writes import CHECKED_FORWARDS, TURN_FORWARDS

FIRST = CHECKED_FORWARDS + 1  # so many forwards, all but the last of which go from block to block


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sites at which forwards stop."""
    found: list[int] = []
    enter = Engine._enter

    def count(engine: Engine, index: int) -> None:
        found.append(index)
        enter(engine, index)

    monkeypatch.setattr(Engine, "_enter", count)
    return found


def shard(plan: str = "device", build: Any = Net, **extra: Any) -> tuple[nn.Module, Any]:
    model = make(build)
    return unbounded.shard(model, adamw(model), {**PLANS[plan], **extra})


@pytest.mark.parametrize(("plan", "num_stops"), [("device", 1), ("host", 4)])
def test_a_forward_stops_at_blocks_only_if_their_weights_come_and_go(
    entered: list[int], plan: str, num_stops: int
) -> None:
    model, optimizer = shard(plan)
    for number in range(FIRST):
        entered.clear()
        train_step(model, optimizer, number)
        with torch.no_grad():
            model(data())
    assert len(entered) == 2 * num_stops


def test_units_still_take_turns_to_be_checked_for_writes_that_nothing_shows(entered: list[int]) -> None:
    model, optimizer = shard(precision="bf16")
    for number in range(FIRST):
        train_step(model, optimizer, number)
    entered.clear()
    model.blocks[1].register_forward_pre_hook(lambda block, _: block.up.weight.data.mul_(0.5))

    def train() -> None:
        for number in range(TURN_FORWARDS * len(optimizer.engine.units) + 1):
            train_step(model, optimizer, number)

    with pytest.raises(unbounded.StateError, match=r"writes to the unit 'blocks\.1' through `\.data`"):
        train()
    assert set(entered) == {0}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", ["device", "host"])
def test_writes_in_place_that_begin_late_are_kept_with_all_that_completes_the_weights(
    plan: str, precision: str
) -> None:
    model, optimizer = shard(plan, precision=precision, loss_scale=1, loss_scale_window=0)
    for group in optimizer.param_groups:
        group["lr"] = 2.0**-12  # less than the weights' last bit
    for number in range(FIRST + 2):
        train_step(model, optimizer, number)

    def write(block: Block, _: Any) -> None:
        with torch.no_grad():
            block.up.weight[0].fill_(0.25)

    others = model.blocks[1].up.weight.detach()[1:].clone()
    handle = model.blocks[1].register_forward_pre_hook(write)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_step(model, optimizer)
    handle.remove()
    optimizer.wait()
    train_step(model, optimizer)
    weight = model.blocks[1].up.weight.detach()
    assert (weight[0] == 0.25).all()
    assert (weight[1:] == others).all()
    unit = next(unit for unit in optimizer.engine.units if unit.name == "blocks.1")
    if "remainder" in unit.states:  # the lower half of the weights
        (slot,) = (slot for slot in unit.layout.slots if slot.name.endswith("up.weight"))
        low = torch.empty(unit.weights.numel, dtype=unit.states["remainder"].dtype)
        unit.states["remainder"].fetch(low, 0).wait()
        assert not low[slot.start : slot.start + 7].any()


def test_hooks_that_users_put_on_a_block_see_their_parameters() -> None:
    model, optimizer = shard()
    mine = dict(model.named_parameters())
    seen: list[bool] = []
    model.blocks[1].register_forward_hook(
        lambda block, *_: seen.append(block.up.weight is mine["blocks.1.up.weight"]), prepend=False
    )
    for number in range(FIRST + 2):
        train_step(model, optimizer, number)
    assert seen == [True] * (FIRST + 2)


class WithoutGraph(Net):
    """Its forward records no graph but for one block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.first(x))
            with torch.enable_grad():
                self.kept = self.blocks[1](x)
            return self.last(self.blocks[2](x))


def gradients_in_one_block_only(model: nn.Module, optimizer: Any) -> Any:
    seen = []
    for number in range(6):
        with torch.no_grad():
            seen.append(model(data(number)))
        model.kept.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(model)


def test_a_graph_of_one_block_in_a_forward_without_gradients() -> None:
    assert_same(
        gradients_in_one_block_only(*shard(build=WithoutGraph)), run_plain(gradients_in_one_block_only, WithoutGraph)
    )


def backward_inside_the_forward(model: nn.Module, optimizer: Any) -> Any:
    """A block's weights are read, and its gradients taken, while the forward goes on."""
    penalties: list[Tensor] = []

    def penalise(block: nn.Module, args: Any, y: Tensor) -> None:
        if torch.is_grad_enabled():
            model.blocks[0](args[0].detach()).square().sum().mul(0.01).backward()
            penalties.append(block.up.weight.norm().detach().clone())

    handle = model.blocks[1].register_forward_hook(penalise)
    losses = [train_step(model, optimizer, number) for number in range(6)]
    handle.remove()
    return losses, penalties, weights(model)


def writes_inside_the_forward(model: nn.Module, optimizer: Any) -> Any:
    def clamp(block: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                block.up.weight.clamp_(-0.2, 0.2)

    handle = model.blocks[2].register_forward_pre_hook(clamp)
    losses = [train_step(model, optimizer, number) for number in range(6)]
    handle.remove()
    return losses, weights(model)


def an_exception_in_a_block(model: nn.Module, optimizer: Any) -> Any:
    seen = []

    def refuse(block: nn.Module, args: Any) -> None:
        raise ValueError("not today")

    for number in range(6):
        handle = model.blocks[1].register_forward_pre_hook(refuse)
        with pytest.raises(ValueError, match="not today"):
            model(data(number))
        handle.remove()
        seen.append(float(model.blocks[1].up.weight.detach().norm()))
        seen.append(train_step(model, optimizer, number))
    return seen, weights(model)


def blocks_of_their_own(model: nn.Module, optimizer: Any) -> Any:
    """Blocks are called without the model between its steps, and by it once more inside its forward."""
    seen = []
    inner = [True]

    def again(module: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        if not inner[0]:
            return None
        inner[0] = False
        try:
            return y + model(args[0]) * 0.5
        finally:
            inner[0] = True

    for number in range(6):
        seen.append(model.blocks[2](torch.ones(1, 7)).detach().clone())
        seen.append(torch.tensor(train_step(model, optimizer, number)))
    handle = model.register_forward_hook(again)
    for number in range(3):
        seen.append(torch.tensor(train_step(model, optimizer, number)))
    handle.remove()
    return seen, weights(model)


def a_step_inside_the_forward(model: nn.Module, optimizer: Any) -> Any:
    seen = []
    for number in range(5):
        model(data(number)).square().mean().backward()
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: optimizer.step())
        with torch.no_grad():
            seen.append(model(data(number)))
        handle.remove()
        optimizer.zero_grad()
    return seen, weights(model)


PROGRAMS: list[Program] = [
    backward_inside_the_forward,
    writes_inside_the_forward,
    an_exception_in_a_block,
    blocks_of_their_own,
    a_step_inside_the_forward,
]


@pytest.mark.parametrize("plan", ["device", "host"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_happens_inside_a_forward_is_as_in_plain_pytorch(program: Program, plan: str) -> None:
    assert_same(program(*shard(plan, activations="keep")), run_plain(program))


@pytest.mark.parametrize("program", PROGRAMS[1:], ids=lambda program: program.__name__)
def test_the_same_where_blocks_run_again(program: Program) -> None:
    assert_same(program(*shard(activations="recompute")), run_plain(program))


def test_a_block_that_runs_twice_in_a_forward() -> None:
    def program(model: nn.Module, optimizer: Any) -> Any:
        return [train_step(model, optimizer, number) for number in range(6)], weights(model)

    def build() -> nn.Module:
        return Net(twice=True)

    assert_same(program(*shard(build=build)), run_plain(program, build))


@pytest.mark.parametrize("plan", ["device", "host"])
def test_a_trace_shows_each_block_in_both_passes(tmp_path: Path, plan: str) -> None:
    model, optimizer = shard(plan)
    for number in range(FIRST + 1):
        train_step(model, optimizer, number)
    with unbounded.trace(tmp_path / "t.json"):
        train_step(model, optimizer)
    names = [span.name for span in read_spans(tmp_path / "t.json") if span.lane == COMPUTE]
    assert [name for name in names if name.startswith("blocks")][:6] == [f"blocks.{i}" for i in (0, 1, 2, 2, 1, 0)]


def test_the_time_of_both_passes_is_counted_without_a_trace() -> None:
    model, optimizer = shard()
    for number in range(FIRST + 1):
        train_step(model, optimizer, number)
    before = lanes.lane_totals()[COMPUTE].count
    loss = model(data()).square().mean()
    between = lanes.lane_totals()[COMPUTE].count
    loss.backward()
    assert (between - before, lanes.lane_totals()[COMPUTE].count - between) == (1, 1)
