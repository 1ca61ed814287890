"""Reading and writing full values: full_params, state_dict, load_state_dict, gradients where they are held."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import unbounded
from tests import process
from tests.zero.training import Batch, Task, TinyGPT, average_gradients, shard
from unbounded.zero.parameters.parameter import ManagedParameter
from unbounded.zero.parameters.views import ModuleViews


def sharded(stage: int, seed: int = 3) -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = TinyGPT()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": stage})
    return model, optimizer, values


def read_full(rank: int, world_size: int, stage: int) -> list[bool]:
    model, _, values = sharded(stage)
    with unbounded.full_params(model):
        inside = [torch.equal(p, values[n]) and p.shape == values[n].shape for n, p in model.named_parameters()]
        by_attribute = torch.equal(model.blocks[0].up.weight, values["blocks.0.up.weight"])
    return [*inside, by_attribute]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_full_params_shows_every_value(ranks: Any, world_size: int, stage: int) -> None:
    for checks in ranks(world_size, read_full, stage):
        assert all(checks)


def write_full(rank: int, world_size: int, stage: int, writer: str) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    model, optimizer, values = sharded(stage)
    with unbounded.full_params(model), torch.no_grad():
        if writer == "in place":
            model.blocks[1].down.weight.mul_(2).add_(1)
        elif writer == "init":
            nn.init.constant_(model.head.bias, 4.0)
        else:
            for p in model.parameters():
                p.data.fill_(0.5)
    weight = dict(model.state_dict())["blocks.1.down.weight"].clone()
    bias = dict(model.state_dict())["head.bias"].clone()
    logits = model(Batch(0, 0, 0).tokens())
    logits.sum().backward()
    optimizer.step()
    after = dict(model.state_dict())["head.bias"].clone()
    change = [float(x) for x in (after - bias)[:2]]
    return change, weight - values["blocks.1.down.weight"] * 2, bias


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("writer", ["in place", "init", "data"])
def test_what_is_written_in_full_params_is_kept_and_trained_on(
    ranks: Any, world_size: int, stage: int, writer: str
) -> None:
    for change, difference, bias in ranks(world_size, write_full, stage, writer):
        if writer == "in place":
            assert torch.allclose(difference, torch.ones_like(difference))
        elif writer == "init":
            assert torch.equal(bias, torch.full_like(bias, 4.0))
        else:
            assert torch.equal(bias, torch.full_like(bias, 0.5))
        assert change == pytest.approx([-1.5, -1.5])  # lr 0.1 times 15 tokens: the master was written too


def nested_and_failing(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    model, _, values = sharded(3)
    with pytest.raises(KeyError, match="inside"), unbounded.full_params(model):  # noqa: PT012
        with torch.no_grad():
            model.head.bias.fill_(2.0)
        raise KeyError("inside")
    failing = mock.patch.object(ModuleViews, "show", fail_third(ModuleViews.show))
    with failing, pytest.raises(MemoryError), unbounded.full_params(model):
        pass
    is_hidden = all(type(parameter) is ManagedParameter for parameter in model.parameters())
    with unbounded.full_params(model), unbounded.full_params(model):
        written = bool((model.head.bias == 2.0).all())
        other = torch.equal(model.norm.weight, values["norm.weight"])
    return written, other, is_hidden


def fail_third(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """Two of several units are shown when the third fails."""
    calls: list[Any] = []

    def shown(views: Any) -> None:
        calls.append(views)
        if len(calls) == 3:
            raise MemoryError
        show(views)

    return shown


def test_full_params_nests_and_survives_an_exception(ranks: Any) -> None:
    assert ranks(2, nested_and_failing) == [(True, True, True)] * 2


def state_dicts(rank: int, world_size: int, stage: int) -> tuple[list[str], list[str], list[bool], list[str]]:
    model, _, values = sharded(stage)
    state = model.state_dict()
    part = model.blocks[1].state_dict(prefix="x.")
    same = [torch.equal(state[name], value) for name, value in values.items()]
    same += [torch.equal(part[f"x.{n}"], values[f"blocks.1.{n}"]) for n in ("norm.weight", "up.weight", "down.bias")]
    kinds = {type(value).__name__ for value in state.values()}
    return list(values), list(state), same, sorted(kinds)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dict_has_the_same_keys_and_full_values(ranks: Any, world_size: int, stage: int) -> None:
    for before, after, same, kinds in ranks(world_size, state_dicts, stage):
        assert after == before
        assert all(same)
        assert kinds == ["Tensor"]


def keeps_values(rank: int, world_size: int, stage: int) -> bool:
    model, optimizer, values = sharded(stage)
    state = model.state_dict()
    model(Batch(0, 0, rank).tokens()).sum().backward()
    optimizer.step()
    model(Batch(0, 0, rank).tokens())
    return all(torch.equal(state[name], value) for name, value in values.items())


def test_a_state_dict_of_a_partitioned_model_is_a_snapshot(ranks: Any) -> None:
    """Unlike a plain model's, it cannot alias the weights. Later it neither changes nor points to freed memory."""
    assert ranks(2, keeps_values, 3) == [True, True]


def load_other(rank: int, world_size: int, stage: int) -> tuple[str, list[bool], float]:
    torch.manual_seed(99)
    other = TinyGPT().state_dict()
    model, optimizer, _ = sharded(stage)
    keys = model.load_state_dict(other)
    same = [torch.equal(model.state_dict()[name], value) for name, value in other.items()]
    loss = model.loss(Batch(0, 0, 0).tokens())
    loss.backward()
    optimizer.step()
    return str(keys), same, float(loss)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_load_state_dict_takes_a_plain_models_values(ranks: Any, world_size: int, stage: int) -> None:
    torch.manual_seed(99)
    expected = TinyGPT().loss(Batch(0, 0, 0).tokens()).item()
    for keys, same, loss in ranks(world_size, load_other, stage):
        assert keys == "<All keys matched successfully>"
        assert all(same)
        assert loss == pytest.approx(expected, rel=1e-6)


def load_wrong(rank: int, world_size: int) -> tuple[str, list[str], list[str]]:
    model, _, values = sharded(3)
    wrong = dict(values)
    wrong["head.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    del wrong["head.bias"]
    keys = model.load_state_dict({**wrong, "extra": torch.zeros(1)}, strict=False)
    return str(error.value), keys.missing_keys, keys.unexpected_keys


def test_load_state_dict_reports_shapes_and_keys_as_torch_does(ranks: Any) -> None:
    for message, missing, unexpected in ranks(2, load_wrong):
        assert "head.bias" in message
        assert "[3]" in message
        assert missing == ["head.bias"]
        assert unexpected == ["extra"]


def gradients(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    model, optimizer, values = sharded(stage)
    plain = TinyGPT()
    plain.load_state_dict(values)
    task = Task()
    assert all(p.grad is None for p in model.parameters())
    task.loss(model, Batch(0, 0, 0)).backward()
    task.loss(plain, Batch(0, 0, 0)).backward()
    seen: dict[str, Any] = {}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        try:
            seen[name] = torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-7)
        except unbounded.StateError as error:
            seen[name] = str(error)
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return seen


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_a_gradient_is_right_where_it_is_held_and_refused_where_not(ranks: Any, world_size: int, stage: int) -> None:
    for seen in ranks(world_size, gradients, stage):
        for name, value in seen.items():
            if world_size == 1 or stage == 0:
                assert value is True, (name, value)
            else:
                assert value is True or (name in value and "grad" in value), (name, value)
    if world_size == 2 and stage >= 2:
        assert any(isinstance(value, str) for value in seen.values())


def clear_by_hand(rank: int, world_size: int, stage: int) -> tuple[list[float], list[float]]:
    """Norms of the same batch: gradients are cleared parameter by parameter, then only those of the first unit."""
    task = Task()
    torch.manual_seed(3)
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {"stage": stage})
    norms = []
    for _ in range(2):
        task.loss(model, Batch(0, 0, rank)).backward()
        norms.append(float(optimizer.clip_grad_norm_(math.inf)))
        for parameter in model.parameters():
            parameter.grad = None
    task.loss(model, Batch(0, 0, rank)).backward()
    model.head.weight.grad = None
    return norms, [float(optimizer.clip_grad_norm_(math.inf)), _norm_without_head(task, rank, world_size)]


def _norm_without_head(task: Task, rank: int, world_size: int) -> float:
    torch.manual_seed(3)
    plain = task.model()
    task.loss(plain, Batch(0, 0, rank)).backward()
    average_gradients(plain, world_size)
    plain.head.weight.grad = None
    return float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_a_gradient_set_to_none_is_gone_wherever_it_was(ranks: Any, world_size: int, stage: int) -> None:
    for (first, second), (ours, reference) in ranks(world_size, clear_by_hand, stage):
        assert first == second > 0
        assert ours == pytest.approx(reference, rel=1e-5)
        assert ours < first


def test_the_norm_follows_a_gradient_that_was_changed() -> None:
    task = Task()
    model = task.model()
    model, optimizer = shard(model, task.optimizer(model), {})
    for _ in range(2):  # the second time the norm is added up as gradients come
        task.loss(model, Batch(0, 0, 0)).backward()
        before = float(optimizer.clip_grad_norm_(math.inf))
        for parameter in model.parameters():
            parameter.grad.mul_(10)  # type: ignore[union-attr]
        assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(10 * before, rel=1e-5)
        optimizer.zero_grad()


def forward_inside(rank: int, world_size: int, plan: dict[str, Any]) -> list[bool]:
    torch.manual_seed(3)
    model = TinyGPT()
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    tokens = Batch(0, 0, rank).tokens()
    with torch.no_grad():
        expected = model(tokens)
    with unbounded.full_params(model):
        inside = torch.equal(model(tokens), expected)
        model.head.bias.add_(1.0)
        shifted = torch.allclose(model(tokens), expected + 1.0, atol=1e-5)
        with torch.enable_grad():
            model(tokens).square().mean().backward()
        readable = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        return [inside, shifted, readable, not torch.allclose(model(tokens), expected + 1.0, atol=1e-5)]


@pytest.mark.parametrize(("world_size", "weights"), [(1, "host"), (1, "disk"), (1, "device"), (2, "device")])
def test_a_model_may_run_while_its_parameters_are_shown(ranks: Any, world_size: int, weights: str) -> None:
    for seen in ranks(world_size, forward_inside, {"weights": weights}):
        assert seen == [True] * 4


class Interrupted(nn.Module):
    """Is stopped in its forward, as by Ctrl-C, while `stops`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.stops = nn.Linear(11, 11), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.stops:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("weights", ["device", "host"])
def test_a_forward_stopped_by_hand_leaves_a_model_to_save_and_to_train(tmp_path: Path, weights: str) -> None:
    torch.manual_seed(3)
    model = TinyGPT()
    model.blocks.insert(1, Interrupted())
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), {"weights": weights})
    model.loss(Batch(0, 0, 0).tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.blocks[1].stops = True
    with pytest.raises(KeyboardInterrupt):
        model(Batch(1, 0, 0).tokens())
    model.blocks[1].stops = False
    unbounded.save(tmp_path / "stopped", model, optimizer)
    model.blocks[1].stops = True
    with pytest.raises(KeyboardInterrupt):
        model(Batch(1, 0, 0).tokens())
    model.blocks[1].stops = False
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    losses = []
    for _ in range(2):
        unbounded.load(tmp_path / "stopped", model, optimizer)
        losses.append(model.loss(Batch(1, 0, 0).tokens()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_dropped_is_freed(tmp_path: Path, compiled: bool) -> None:
    model = TinyGPT()
    if compiled:
        model.compile(backend="eager")
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    model(Batch(0, 0, 0).tokens()).square().mean().backward()
    optimizer.step()
    optimizer.wait()
    alive = weakref.ref(model)
    del model, optimizer
    torch._dynamo.reset()
    assert process.is_freed(alive)


def test_frozen_complex_parameters_are_shown_and_kept() -> None:
    model = nn.Linear(4, 4)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128), requires_grad=False)  # type: ignore[assignment]
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    model, _ = unbounded.shard(model, optimizer, {"weights": "host"})
    with unbounded.full_params(model):
        model.phase[1] = 2j
    assert model.state_dict()["phase"].tolist() == [1, 2j, 1]


class Gained(nn.Linear):
    """Reads what its user keeps on its weight, and keeps more there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.calls += 1
        self.weight.seen = float(x.detach().sum())
        return super().forward(x) * self.weight.gain


@pytest.mark.parametrize("weights", ["device", "host"])
def test_what_is_kept_on_a_parameter_is_there_in_forwards_and_what_they_keep_stays(weights: str) -> None:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        model: Any = nn.Sequential(Gained(4, 4), Gained(4, 4))
        model[0].weight.calls = 5
        if is_sharded:
            model, _ = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"weights": weights})
        model[1].weight.calls = 0
        for number, layer in enumerate(model):
            layer.weight.gain = number + 2
        x = torch.randn(2, 4)
        seen = [model(x).detach()]
        for layer in model:
            layer.weight.gain += 1
        with torch.no_grad():
            seen.append(model(x))
        del model[0].weight.gain
        with torch.no_grad(), pytest.raises(AttributeError, match="gain"):
            model(x)
        found.append(
            (seen, [(layer.weight.calls, layer.weight.seen, vars(layer.weight).get("gain")) for layer in model])
        )
    torch.testing.assert_close(found[1], found[0])


def test_the_data_of_a_parameter_is_read_and_copied_like_any_tensor(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    expected = model.weight.detach().clone()
    model, _ = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"weights": "host"})
    data = model.weight.data
    torch.save({"weight": data}, tmp_path / "weight.pt")
    average = torch.zeros(4, 4).lerp_(data, 1.0)
    for value in (data, data.clone(), copy.deepcopy(data), torch.load(tmp_path / "weight.pt")["weight"], average):
        assert torch.equal(value, expected)
    copy.deepcopy(data).add_(1.0)
    data.clone().add_(1.0)
