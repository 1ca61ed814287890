"""What cannot work is refused before anything is touched. Every rank says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import Batch, TinyGPT, shard

PlanError, StateError = unbounded.PlanError, unbounded.StateError


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def shard_twice() -> None:
    model = TinyGPT()
    model, optimizer = shard(model, adamw(model), {})
    unbounded.shard(model, optimizer)


def shard_inside_sharded() -> None:
    model = TinyGPT()
    block = model.blocks[0]
    unbounded.shard(block, adamw(block))
    unbounded.shard(model, adamw(model))


def optimizer_misses() -> None:
    model = TinyGPT()
    parameters = [p for n, p in model.named_parameters() if n != "blocks.1.up.bias"]
    unbounded.shard(model, torch.optim.AdamW(parameters))


def optimizer_duplicates() -> None:
    model = TinyGPT()
    optimizer = adamw(model)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.head.bias]})
    unbounded.shard(model, optimizer)


def optimizer_of_another_model() -> None:
    unbounded.shard(TinyGPT(), adamw(TinyGPT()))


def optimizer_has_more() -> None:
    model = TinyGPT()
    unbounded.shard(model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3, 4))]))


def optimizer_not_an_optimizer() -> None:
    unbounded.shard(TinyGPT(), {"lr": 0.1})  # type: ignore[arg-type]


def model_not_a_module() -> None:
    unbounded.shard(torch.zeros(3), None)  # type: ignore[arg-type]


def nothing_to_place() -> None:
    unbounded.shard(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.PReLU(0)), None)


def optimizer_looks_at_neighbours() -> None:
    model = TinyGPT()
    unbounded.shard(model, torch.optim.LBFGS(model.parameters()))


def devices_differ() -> None:
    model = TinyGPT()
    model.blocks[1].up.weight = nn.Parameter(torch.empty(23, 11, device="meta"))
    unbounded.shard(model, adamw(model))


def sparse_gradients() -> None:
    model = TinyGPT()
    model.embedding = nn.Embedding(31, 11, sparse=True)
    unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def unknown_key() -> None:
    plan_of({"prefetch_unit": 2})


def unknown_key_without_a_neighbour() -> None:
    plan_of({"zzz": 2})


def bad_stage() -> None:
    plan_of({"stage": 4})


def stage_as_text() -> None:
    plan_of({"stage": "three"})


def bad_precision() -> None:
    plan_of({"precision": "bf61"})


def bad_tier() -> None:
    plan_of({"optimizer": "hots"})


def tier_of_deepspeed() -> None:
    plan_of({"weights": "cpu"})


def tier_of_disks() -> None:
    unbounded.Plan(optimizer="nvme")


def bad_bytes() -> None:
    plan_of({"device_bytes": "24 apples"})


def bad_prefetch() -> None:
    plan_of({"prefetch_units": -1})


def scale_beyond_floats() -> None:
    plan_of({"loss_scale": 10**400})


def plan_as_text() -> None:
    plan_of("fast")


def plan_of(plan: Any) -> None:
    model = TinyGPT()
    unbounded.shard(model, adamw(model), plan)


SHARDING: list[tuple[Callable[[], None], type[Exception], list[str]]] = [
    (shard_twice, (PlanError, StateError), ["already sharded", "to shard it anew, call unbounded.unshard"]),
    (shard_inside_sharded, (PlanError, StateError), ["already sharded", "blocks.0"]),
    (optimizer_misses, PlanError, ["blocks.1.up.bias"]),
    (optimizer_duplicates, PlanError, ["head.bias", "group"]),
    (optimizer_of_another_model, PlanError, ["optimizer", "model"]),
    (optimizer_has_more, PlanError, ["1 parameter", "model.parameters()"]),
    (optimizer_not_an_optimizer, (PlanError, TypeError), ["dict"]),
    (model_not_a_module, (PlanError, TypeError), ["Tensor"]),
    (nothing_to_place, PlanError, ["Sequential", "no parameters"]),
    (optimizer_looks_at_neighbours, PlanError, ["LBFGS", "AdamW"]),
    (devices_differ, PlanError, ["blocks.1.up.weight", "meta", "cpu"]),
    (sparse_gradients, PlanError, ["'embedding'", "sparse=False"]),
    (unknown_key, PlanError, ["'prefetch_unit'", "Did you mean 'prefetch_units'"]),
    (unknown_key_without_a_neighbour, PlanError, ["'zzz'", "stage", "precision"]),
    (bad_stage, PlanError, ["stage is 4", "0, 1, 2, 3"]),
    (stage_as_text, PlanError, ["stage is 'three'"]),
    (bad_precision, PlanError, ["'bf61'", "Did you mean 'bf16'"]),
    (bad_tier, PlanError, ["'hots'", "'host'"]),
    (tier_of_deepspeed, PlanError, ["'cpu'", "Did you mean 'host'?"]),
    (tier_of_disks, PlanError, ["'nvme'", "Did you mean 'disk'?"]),
    (bad_bytes, PlanError, ["device_bytes", "24 apples"]),
    (bad_prefetch, PlanError, ["prefetch_units is -1"]),
    (scale_beyond_floats, PlanError, ["loss_scale is 1000", "above 0 and at most 1.79769e+308"]),
    (plan_as_text, PlanError, ["'fast'", '"auto"']),
]


@pytest.mark.parametrize(("act", "kind", "facts"), SHARDING, ids=lambda value: getattr(value, "__name__", ""))
def test_sharding_refuses_with_what_is_wrong(act: Callable[[], None], kind: Any, facts: list[str]) -> None:
    with pytest.raises(kind) as error:
        act()
    for fact in facts:
        assert fact in str(error.value)
    assert str(error.value).rstrip().endswith((".", "?"))


def test_a_refused_model_is_left_as_it_was() -> None:
    model = TinyGPT()
    with pytest.raises(PlanError):
        unbounded.shard(model, torch.optim.AdamW(list(model.parameters())[:-1]))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model.loss(Batch(0, 0, 0).tokens()).backward()
    unbounded.shard(model, adamw(model))


def refused(rank: int, world_size: int, act: str) -> str:
    torch.manual_seed(3)
    model = TinyGPT()
    if act == "another model":
        model = TinyGPT(depth=3 + rank)
    if act == "another plan":
        plan = {"stage": 2 + rank}
        with pytest.raises(PlanError) as error:
            unbounded.shard(model, adamw(model), plan)
        return str(error.value)
    if act == "another model":
        with pytest.raises(PlanError) as error:
            unbounded.shard(model, adamw(model))
        return str(error.value)
    model, optimizer = shard(model, adamw(model), {"stage": 3})
    weight = model.blocks[1].up.weight
    with pytest.raises(StateError) as failure:
        ACTS[act](model, weight, optimizer)
    return str(failure.value)


def _write(model: nn.Module, weight: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight.add_(1)


def _assign(model: nn.Module, weight: Any, optimizer: Any) -> None:
    weight.data = torch.zeros(23, 11)


def _index(model: nn.Module, weight: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight[0] = 0.0


def _initialise(model: nn.Module, weight: Any, optimizer: Any) -> None:
    nn.init.zeros_(weight)


def _convert(model: nn.Module, weight: Any, optimizer: Any) -> None:
    model.double()


def _write_data(model: nn.Module, weight: Any, optimizer: Any) -> None:
    weight.data.clamp_(-1, 1)


def _write_item_of_data(model: nn.Module, weight: Any, optimizer: Any) -> None:
    weight.data[0] = 1.0


def _step_inside_full_params(model: nn.Module, weight: Any, optimizer: Any) -> None:
    with unbounded.full_params(model):
        optimizer.step()


def _save_inside_full_params(model: nn.Module, weight: Any, optimizer: Any) -> None:
    with unbounded.full_params(model):
        unbounded.save("unused", model, optimizer)


def _set_gradient(model: nn.Module, weight: Any, optimizer: Any) -> None:
    weight.grad = torch.zeros(23, 11)


def _read_gradient(model: nn.Module, weight: Any, optimizer: Any) -> None:
    model.loss(Batch(0, 0, 0).tokens()).backward()
    weight.grad.sum()


def _replace(model: nn.Module, weight: Any, optimizer: Any) -> None:
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(23, 11))
    model(Batch(0, 0, 0).tokens())


def _pickle(model: nn.Module, weight: Any, optimizer: Any) -> None:
    import io

    torch.save(weight, io.BytesIO())


def _add_group(model: nn.Module, weight: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


ACTS: dict[str, Callable[[nn.Module, Any, Any], None]] = {
    "write": _write,
    "assign": _assign,
    "index": _index,
    "initialise": _initialise,
    "convert": _convert,
    "write data": _write_data,
    "write item of data": _write_item_of_data,
    "step inside full_params": _step_inside_full_params,
    "save inside full_params": _save_inside_full_params,
    "set gradient": _set_gradient,
    "read gradient": _read_gradient,
    "replace": _replace,
    "pickle": _pickle,
    "add group": _add_group,
}


@pytest.mark.parametrize(
    ("act", "facts"),
    [
        ("write", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("assign", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("index", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("initialise", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("convert", ["before `shard`"]),
        ("write data", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("write item of data", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("step inside full_params", ["optimizer.step", "after the block"]),
        ("save inside full_params", ["unbounded.save", "after the block"]),
        ("set gradient", ["blocks.1.up.weight", "unbounded.full_params"]),
        ("read gradient", ["blocks.1.up.weight", "grad"]),
        ("replace", ["blocks.1.up.weight"]),
        ("pickle", ["unbounded.save"]),
        ("add group", ["before `shard`"]),
    ],
)
def test_a_sharded_model_refuses_what_would_go_wrong(ranks: Any, act: str, facts: list[str]) -> None:
    for message in ranks(2, refused, act):
        for fact in facts:
            assert fact in message


@pytest.mark.parametrize(("act", "fact"), [("another model", "model"), ("another plan", "plan")])
def test_ranks_that_disagree_are_told_so_on_every_rank(ranks: Any, act: str, fact: str) -> None:
    messages = ranks(2, refused, act)
    assert messages[0] == messages[1]
    assert f"rank 1 has a different {fact} from rank 0" in messages[0]


def test_full_params_of_a_plain_model_says_what_to_call() -> None:
    with pytest.raises(StateError, match=r"not sharded.*unbounded\.shard"), unbounded.full_params(TinyGPT()):
        pass
