"""Streams of the user's own, of which each is the set of the work that it has seen; `tests/gpu` has those of a GPU."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.training import shard
from unbounded.errors import StateError
from unbounded.zero.passes import capture, trail
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.trail import Trail
from unbounded.zero.passes.turns import Turns, one_at_a_time
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.unit import Unit, WeightState

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream, self.device = number, GPU
        self.seen: set[Any] = set()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen


class Streams:
    """Two of them; `current` is one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main, self.side = Stream(1), Stream(2)
        self.current = self.main
        follow = Trail.follow
        patch.setattr(Trail, "follow", lambda self, _: follow(self, GPU))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.current.cuda_stream, raising=False)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(trail, "is_capturing", lambda _: False)
        patch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Fork(nn.Module):
    """Each block runs on both streams, which meet at the end."""

    def __init__(self, streams: Any) -> None:
        super().__init__()
        self.streams, self.blocks = streams, nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        streams, one, other = self.streams, x, x
        streams.side.wait_stream(streams.main)
        for index, block in enumerate(self.blocks):
            for stream in (streams.main, streams.side) if index % 2 else (streams.side, streams.main):
                with streams.on(stream):
                    if stream is streams.main:
                        one = block(one)
                    else:
                        other = block(other)
        streams.main.wait_stream(streams.side)
        with streams.on(streams.main):
            result = (one + other).square().mean()
        streams.side.wait_stream(streams.main)
        return result


def test_every_stream_waits_for_weights_and_they_are_freed_after_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = Fork(streams)
    model, _ = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"weights": "host"})
    brought: dict[str, object] = {}
    uses: dict[str, set[object]] = defaultdict(set)
    freed: set[object] = set()  # the uses of what was there before: whoever brings something waits for the last stream
    wrong: set[str] = set()
    order, free = Gathering.order_stream, Gathering._free

    def bring(self: Gathering, unit: Unit) -> None:
        if unit.state is WeightState.FETCHING:
            brought[unit.name] = object()
            streams.current.seen.add(brought[unit.name])
        order(self, unit)

    def let_go(self: Gathering, unit: Unit) -> None:
        free(self, unit)
        freed.update(uses.pop(unit.name, ()))
        if not freed <= streams.current.seen:
            wrong.add(f"{unit.name} is freed while another stream uses weights")

    def use(name: str) -> None:
        if brought[name] not in streams.current.seen:
            wrong.add(f"{name} is used before it is there")
        uses[name].add(token := object())
        streams.current.seen.add(token)

    monkeypatch.setattr(Gathering, "order_stream", bring)
    monkeypatch.setattr(Gathering, "_free", let_go)
    for name, block in model.named_modules():
        if isinstance(block, nn.Linear):
            block.register_forward_pre_hook(lambda _, __, name=name: use(name))
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        with torch.no_grad(), streams.on(streams.side):  # nobody told either to wait for the other
            model(torch.ones(2, 8))
    assert freed
    assert not wrong


@pytest.mark.parametrize("plan", [{}, {"gradients": "host"}], ids=str)
def test_who_calls_a_backward_waits_for_the_streams_of_its_gradients(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch waits for those of its leaves: here those that were current in `shard`."""
    streams = Streams(monkeypatch)
    model: nn.Module = nn.Linear(8, 8, bias=False)
    model, _ = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    collect, complete, on = Reduction.collect, Reduction._complete, []

    def collect_there(self: Reduction, *arguments: Any, **options: Any) -> None:
        with streams.on(streams.side):
            streams.side.seen.add("gradient")
            collect(self, *arguments, **options)

    def complete_where(self: Reduction, *arguments: Any, **options: Any) -> None:
        on.append(streams.current)
        complete(self, *arguments, **options)

    monkeypatch.setattr(Reduction, "collect", collect_there)
    monkeypatch.setattr(Reduction, "_complete", complete_where)
    model(torch.ones(2, 8)).sum().backward()
    assert on == [streams.side]
    assert "gradient" in streams.main.seen


class Idle:
    thread, is_running = threading.current_thread(), False


class Turned:
    """What calls an engine has."""

    def __init__(self) -> None:
        self.device, self.turns = torch.device("cuda", 1), Turns(Idle(), Idle(), torch.device("cuda", 1))  # type: ignore[arg-type]

    def check_process(self) -> None:
        pass

    @one_at_a_time
    def device_in_call(self) -> int:
        return torch.cuda.current_device()


def test_the_current_device_of_any_thread_is_the_models_while_it_uses_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    model = Turned()
    assert model.device_in_call() == 1
    assert now == [0]
    with model.turns:
        assert now == [1]
        with model.turns:
            assert model.device_in_call() == 1
        assert now == [1]
    assert now == [0]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_training_in_a_cuda_graph_is_refused_and_goes_on_outside(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 8)
    reference = copy.deepcopy(model)
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), {"weights": tier})
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(2):
        x = torch.full((2, 8), step + 1.0)
        reference(x).square().sum().backward()
        theirs.step()
        theirs.zero_grad()
        for run, what in (
            (lambda: model(x).square().sum().backward(), "a backward" if tier == "device" else "a fetch .*"),  # noqa: B023
            (optimizer.step, "an update"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(capture, "is_capturing", lambda _: True)
                with pytest.raises(StateError, match=f"{what} of a sharded model runs while a CUDA graph"):
                    run()
            run()
        optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
