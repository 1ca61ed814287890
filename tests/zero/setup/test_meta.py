"""Models built on the meta device: units are made, initialised and partitioned one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.counting import live_bytes
from tests.zero.training import Block, Task, TinyGPT, assert_identical, shard, train_ours


class Eager(Task):
    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return TinyGPT()


class Meta(Task):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = TinyGPT()
        torch.manual_seed(11)
        return model


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 3), (4, 3)])
def test_a_meta_model_trains_as_the_eager_one_of_the_same_seed(ranks: Any, world_size: int, stage: int) -> None:
    """Modules here are registered in the order in which their constructors draw numbers, so the same ones are drawn."""
    eager = ranks(world_size, train_ours, Eager(), {"stage": stage})
    meta = ranks(world_size, train_ours, Meta(), {"stage": stage})
    for one, other in zip(eager, meta, strict=True):
        assert_identical(one, other)


def initial_state(rank: int, world_size: int, stage: int, unit_numel: int) -> tuple[dict[str, torch.Tensor], bool]:
    model = Meta().model()
    model, _ = shard(model, torch.optim.AdamW(model.parameters()), {"stage": stage, "unit_numel": unit_numel})
    left = any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return {name: value.clone() for name, value in model.state_dict().items()}, left


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("unit_numel", [1, 64, None])
def test_initial_values_do_not_depend_on_units_or_ranks(ranks: Any, stage: int, unit_numel: int) -> None:
    eager = Eager().model().state_dict()
    for world_size in (1, 2):
        for state, left_on_meta in ranks(world_size, initial_state, stage, unit_numel):
            assert not left_on_meta
            assert list(state) == list(eager)
            for name, value in state.items():
                assert torch.equal(value, eager[name]), name


class Table(nn.Module):
    """A buffer that is computed, not drawn, and is not in the checkpoint: rotary tables are like this."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(5, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.empty(2, dtype=torch.int64))
        self.weight = nn.Parameter(torch.empty(7, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(5) / 3)
        self.count.fill_(9)
        nn.init.normal_(self.weight)


def buffers_of_meta(rank: int, world_size: int) -> dict[str, tuple[str, list[float]]]:
    with torch.device("meta"):
        model = nn.Sequential(Table(), Block(11), Table())
    model, _ = shard(model, torch.optim.AdamW(model.parameters()), {})
    return {name: (str(b.dtype), b.tolist()) for name, b in model.named_buffers()}


def test_buffers_of_a_meta_model_are_initialised_in_their_own_dtype(ranks: Any) -> None:
    table = (torch.arange(5) / 3).double().tolist()
    for buffers in ranks(2, buffers_of_meta):
        assert buffers["0.table"] == buffers["2.table"] == ("torch.float64", table)
        assert buffers["0.count"] == ("torch.int64", [9, 9])


@pytest.mark.parametrize(
    "make",
    [lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))],
)
def test_a_module_may_initialise_what_is_below_it(make: Any) -> None:
    torch.manual_seed(5)
    wanted = make().state_dict()
    with torch.device("meta"):
        model = make()
    torch.manual_seed(5)
    model, _ = unbounded.shard(model, None, {"stage": 3})
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


class NoReset(nn.Module):
    """Draws its parameters in its constructor, and has no way to do it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))


def refuse_no_reset(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), NoReset())
    with pytest.raises(unbounded.UnboundedError) as error:
        shard(model, torch.optim.AdamW(model.parameters()), {})
    return str(error.value)


def test_a_meta_module_that_cannot_be_initialised_is_named(ranks: Any) -> None:
    for message in ranks(2, refuse_no_reset):
        assert "reset_parameters" in message
        assert "1" in message
        assert "NoReset" in message


class Half(nn.Module):
    """Fills a part of what it has: the rest is computed only in its constructor."""

    def __init__(self, blank: str) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3) / 2.0, persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.blank = blank

    def reset_parameters(self) -> None:
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name != self.blank:
                tensor.data.fill_(True)  # which counts as no change of the tensor


def shard_half(rank: int, world_size: int, blank: str) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Half(blank))
    try:
        shard(model, torch.optim.AdamW(model.parameters()), {})
    except unbounded.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("blank", ["weight", "scale", "table", "mask", "count", ""])
def test_what_nothing_gives_values_to_is_an_error_and_not_left_at_chance(ranks: Any, blank: str) -> None:
    for message in ranks(2, shard_half, blank):
        assert message.startswith(f"1.{blank} (of Half) were on the meta device, and nothing" if blank else "")
        assert bool(message) == bool(blank)


class Watched(nn.Linear):
    """Notes how many bytes of tensors are alive whenever one of its kind is initialised."""

    alive: list[int] = []  # noqa: RUF012

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            Watched.alive.append(live_bytes())


def peak_of_initialisation(rank: int, world_size: int) -> tuple[int, int]:
    Watched.alive.clear()
    before = live_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(Watched(256, 256, bias=False) for _ in range(16)))
    model, _ = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3, "unit_numel": 1})
    return max(Watched.alive) - before, 16 * 256 * 256 * 4


def test_no_rank_ever_holds_the_whole_model(ranks: Any) -> None:
    for peak, whole in ranks(4, peak_of_initialisation):
        assert peak <= 0.5 * whole  # this rank has a quarter of the model, and one unit of 16 is being made
