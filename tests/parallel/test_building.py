"""Parallel models from the meta device, from pretrained weights, with adapters, written by users, and as DTensors."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unbounded
from tests import process
from tests.parallel import models
from tests.parallel.comparing import optimizer_of, train_parallel, train_plain, worst_error
from unbounded.planner.presets import UNMEASURED
from unbounded.planning.running_step import predict_step

PRELOAD_IN_RANKS = ("transformers.modeling_utils", "peft")


def build_on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return models.build(family)


def start_over_axes(rank: int, size: int, plans: list[dict[str, Any]], family: str) -> list[list[str]]:
    """For each plan what starts with other values than on one rank."""
    model = build_on_meta(family)
    torch.manual_seed(21)
    plain, _ = unbounded.shard(model, None, {"stage": 0})
    wanted = plain.state_dict()
    return [start_from_meta(rank, size, plan, None, family, wanted)[0] for plan in plans]


def start_from_meta(
    rank: int,
    size: int,
    plan: dict[str, Any],
    folder: str | None,
    family: str = "gpt2",
    wanted: dict[str, torch.Tensor] | None = None,
) -> Any:
    wanted = models.build(family).state_dict() if wanted is None else wanted
    model = build_on_meta(family)
    torch.manual_seed(21 + rank)  # only the first rank's counts
    read: list[tuple[int, ...]] = []
    if folder is not None:
        from unbounded.weights.safetensors_reader import WeightFolder

        whole = WeightFolder.read
        WeightFolder.read = lambda self, key: read.append(whole(self, key).shape) or whole(self, key)  # type: ignore
    try:
        model, _ = unbounded.shard(model, None, plan, weights=folder)
    finally:
        if folder is not None:
            WeightFolder.read = whole  # type: ignore[method-assign]
    # How fast its ranks exchange activations was not measured: no prediction, rather than a wrong one.
    assert predict_step(model, tokens=64, sequence=16, machine=UNMEASURED) is None
    found = model.state_dict()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)], read


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])  # the last two also scale what is below a module
def test_a_model_on_the_meta_device_starts_as_on_one_rank(ranks: Any, family: str) -> None:
    plans = [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved"}]
    assert ranks(2, start_over_axes, plans, family) == [[[], [], []]] * 2


class Policy(nn.Module):
    """A transformers model inside a user's own model, next to a head of another kind."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.inner, self.score = models.build(family), nn.Linear(16, 1)

    def _init_weights(self) -> None:
        """Has that name, but initialises only this module."""


def start_inside(rank: int, size: int) -> list[str]:
    for family in ("gpt2", "llama", "bert", "t5"):
        alone = build_on_meta(family)
        torch.manual_seed(21)
        alone, _ = unbounded.shard(alone, None, {"stage": 3})
        with torch.device("meta"):
            policy = Policy(family)
        torch.manual_seed(21)
        policy, _ = unbounded.shard(policy, None, {"stage": 3})
        wanted, found = alone.state_dict(), policy.state_dict()
        different = [name for name, value in wanted.items() if not torch.equal(found[f"inner.{name}"], value)]
        if different or not found["score.weight"].abs().sum() > 0:
            return [family, *different]
    return []


def test_a_transformers_model_on_the_meta_device_starts_inside_another_as_by_itself(ranks: Any) -> None:
    assert ranks(2, start_inside) == [[], []]


@pytest.mark.parametrize("plan", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}])
def test_pretrained_weights_are_read_in_slices(ranks: Any, tmp_path: Path, plan: dict[str, Any]) -> None:
    models.build("gpt2").save_pretrained(tmp_path)
    for different, read in ranks(4 if "pipeline" in plan else 2, start_from_meta, plan, str(tmp_path)):
        assert not different
        assert all(len(shape) == 1 or shape == (32, 16) for shape in read)  # norms, row biases, positions: not cut


class Perceptron(nn.Module):
    """A user's own model, without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def train_perceptron(model: nn.Module, optimizer: Any) -> list[float]:
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(5):
        loss = (model(torch.randn(6, 8, generator=generator)) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def own_model(rank: int, size: int, kind: str) -> Any:
    torch.manual_seed(4)
    model = Perceptron()
    plain = copy.deepcopy(model)
    expected = train_perceptron(plain, optimizer_of(plain))
    if kind == "styles":
        styles = (("up", "column"), ("down", "row"))
        model, optimizer = unbounded.shard(model, optimizer_of(model), {"tensor": 2, "styles": styles})
        found = train_perceptron(model, optimizer)
        return expected, found, worst_error(model.state_dict(), plain.state_dict())
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert isinstance(model.up.weight, DTensor)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=2e-3, eps=1e-5, weight_decay=0.1)
    reference = Perceptron()
    torch.manual_seed(4)
    reference = Perceptron()
    expected = train_perceptron(
        reference, torch.optim.AdamW(reference.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.1)
    )
    model, optimizer = unbounded.shard(model, optimizer, {"stage": 3}, mesh=mesh)
    found = train_perceptron(model, optimizer)
    seen: list[Any] = []
    handle = model.up.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    model(torch.zeros(1, 8))
    handle.remove()
    assert seen == [DTensor]
    return expected, found, worst_error(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize(("kind", "size"), [("styles", 2), ("dtensor", 2), ("dtensor", 4)])
def test_a_model_of_the_users_own_trains_as_on_one_rank(ranks: Any, kind: str, size: int) -> None:
    for expected, found, worst in ranks(size, own_model, kind):
        assert found == pytest.approx(expected, rel=1e-5)
        assert worst[0] < 1e-4, worst


class Featured(nn.Module):
    """Features that are drawn once and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.randn(8, 8))
        self.register_buffer("mask", torch.rand(3) < 0.5)
        self.blocks = nn.ModuleList(Perceptron() for _ in range(2))


def draw_features(rank: int, size: int, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = Featured()
    unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    return dict(model.named_buffers())


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_of_an_axis_have_the_buffers_of_its_first_rank(ranks: Any, axis: str) -> None:
    styles = {"styles": (("blocks.*.up", "column"), ("blocks.*.down", "row"))} if axis == "tensor" else {}
    torch.manual_seed(0)
    wanted = dict(Featured().named_buffers())
    for found in ranks(2, draw_features, {axis: 2, **styles}):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


BY_HAND = (
    *((f"model.layers.*.self_attn.{name}_proj", "column") for name in "qkv"),
    ("model.layers.*.self_attn.o_proj", "row"),
    ("model.layers.*.mlp.up_proj", "column"),
    ("model.layers.*.mlp.gate_proj", "column"),
    ("model.layers.*.mlp.down_proj", "row"),
)


def styles_by_hand(rank: int, size: int) -> Any:
    """Its blocks are given a cache of keys and values, which a trial of the styles must not fill."""
    model, plain = models.build("llama"), models.build("llama")
    expected = train_plain(plain, "llama", steps=1)
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"tensor": 2, "styles": BY_HAND})
    return expected, train_parallel(model, optimizer, "llama", steps=1)


def test_styles_may_be_given_for_a_transformers_model(ranks: Any) -> None:
    for expected, found in ranks(2, styles_by_hand):
        assert found == pytest.approx(expected, rel=1e-5)


def adapt(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    torch.manual_seed(9)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def adapters(rank: int, size: int, plans: list[dict[str, Any]]) -> Any:
    results = []
    plain = adapt(models.build("llama"))
    expected = train_plain(plain, "llama")
    for plan in plans:
        model = adapt(models.build("llama"))
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        found = train_parallel(model, optimizer, "llama")
        results.append((expected, found, worst_error(model.state_dict(), plain.state_dict())))
    return results


def test_adapters_are_cut_with_their_layers(ranks: Any) -> None:
    for results in ranks(2, adapters, [{"tensor": 2}, {"tensor": 2, "sequence": True}]):
        for expected, found, worst in results:
            assert found == pytest.approx(expected, rel=1e-5)
            assert worst[0] < 1e-4, worst


def generate_with_adapters(rank: int, size: int, plans: list[dict[str, Any]]) -> list[bool]:
    plain, given = adapt(models.build("llama")).eval(), models.batch("llama", 0)["input_ids"]
    asked = {"input_ids": given, "max_new_tokens": 3, "do_sample": False, "use_cache": False}
    wanted, same = plain.generate(**asked), []
    for plan in plans:
        model = adapt(models.build("llama"))
        model, _ = unbounded.shard(model, optimizer_of(model), plan)
        same.append(torch.equal(model.eval().generate(**asked), wanted))
        with torch.no_grad():
            same.append(torch.allclose(model(given).logits, plain(given).logits, rtol=1e-4, atol=1e-5))
    return same


def test_a_model_with_adapters_generates_over_a_pipeline(ranks: Any) -> None:
    plans = [{"pipeline": 2, "microbatches": 2}, {"pipeline": 2, "schedule": "interleaved", "microbatches": 2}]
    assert ranks(2, generate_with_adapters, plans) == [[True] * 4] * 2


def make_and_forget(
    rank: int, size: int, plans: list[dict[str, Any]], most: list[int] | None = None
) -> tuple[int, int]:
    """The threads at the start of a job, and the engines that are left once its models are gone."""
    from unbounded.zero.engine import Engine

    gc.collect()
    num_threads, _ = process.settled(threads=None if most is None else most[rank])
    for plan in plans:
        model = models.build("llama", num_hidden_layers=2)
        unbounded.shard(model, optimizer_of(model), plan)
        with torch.no_grad():
            model(**models.batch("llama", 0))  # which ranks compare in a lane of their own
        del model
    engines = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is Engine]  # asking a dead proxy raises
    process.is_freed(*engines)
    return num_threads, sum(engine() is not None for engine in engines)


def test_models_over_axes_are_freed_with_their_threads_and_groups(ranks: Any) -> None:
    plans = [{"tensor": 2}, {"pipeline": 2}, {"context": 2}]
    ranks(2, make_and_forget, plans)
    second = ranks(2, make_and_forget, plans)
    third = ranks(2, make_and_forget, plans, [num_threads + 1 for num_threads, _ in second])
    for (before, engines), (after, engines_after) in zip(second, third, strict=True):
        assert engines == engines_after == 0
        assert after <= before + 1  # the heartbeat of the last job may still be running
