"""Policies of sharded models: the same bits on any number of ranks and any stage, within the host's budget."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.activations.models import (
    ALL,
    Changed,
    Looped,
    Stack,
    State,
    WithDropout,
    WithMask,
    WithTable,
    losses_of,
    make,
    tokens,
)
from tests.zero.training import Batch, Run, Task, assert_identical_weights, small_units, train_ours
from unbounded.errors import BudgetError, PlanError, StateError
from unbounded.sharding.running import sharded

POLICIES = ("recompute", "host", (("blocks.0", "keep"), ("blocks.1", "recompute"), ("*", "host")))


class Zoo(Task):
    """The models of `tests.activations.models`, two microbatches per step."""

    steps, accumulate = 2, 2

    def __init__(self, kind: type[Stack]) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return self.kind()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.tokens(rows=2, length=4, vocabulary=17))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-5)

    def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            model.eval()(tokens())
        model.train()


class Compiled(Zoo):
    def model(self) -> nn.Module:
        model = self.kind(depth=3)  # one for each policy
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model


def run_all(rank: int, world_size: int, task: Task, plan: dict[str, Any], policies: Any = POLICIES) -> list[Run]:
    torch._dynamo.reset()
    return [
        train_ours(rank, world_size, task, plan | ({"activations": policy} if policy else {}))
        for policy in (None, *policies)
    ]


def assert_all_the_same(results: list[list[Run]]) -> None:
    for plain, *others in results:
        assert len(plain.losses) == 4
        for other in others:
            assert other.losses == plain.losses
            assert_identical_weights(other, plain)


@pytest.mark.parametrize("kind", [*ALL, Changed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3)])
def test_every_policy_gives_the_bits_of_the_model_as_it_is(ranks: Any, kind: Any, world_size: int, stage: int) -> None:
    assert_all_the_same(ranks(world_size, run_all, Zoo(kind), {"stage": stage}))


@pytest.mark.parametrize("kind", [WithMask, WithDropout, Looped], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (2, 2), (4, 2), (4, 3)])
def test_every_stage_takes_policies(ranks: Any, kind: Any, world_size: int, stage: int) -> None:
    assert_all_the_same(ranks(world_size, run_all, Zoo(kind), {"stage": stage}))


@pytest.mark.parametrize("plan", [{"weights": "host", "optimizer": "disk"}, {"precision": "bf16"}], ids=str)
def test_every_tier_and_precision_takes_policies(ranks: Any, plan: dict[str, Any]) -> None:
    assert_all_the_same(ranks(2, run_all, Zoo(WithDropout), plan))
    assert_all_the_same(ranks(2, run_all, Zoo(Changed), plan))


def test_blocks_that_were_compiled_take_policies(ranks: Any) -> None:
    """One that compiles is as costly as ten that do not, so it has all policies at once."""
    assert_all_the_same(ranks(2, run_all, Compiled(Changed), {"stage": 3}, POLICIES[-1:]))


def shard_stack(model: nn.Module, **plan: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unbounded.shard(model, optimizer, {"device_bytes": "1MiB", "host_bytes": "64MiB", **plan})


@pytest.mark.parametrize("policy", ["recompute", "host"])
@pytest.mark.parametrize("weights", ["device", "host"])
def test_policies_may_be_given_before_sharding_and_after(policy: str, weights: str) -> None:
    expected = losses_of(*shard_stack(make(Stack), weights=weights))
    early = make(Stack)
    handle = unbounded.checkpoint_activations(early, policy)
    early, optimizer = shard_stack(early, weights=weights)
    assert losses_of(early, optimizer) == expected
    used = optimizer.memory()["host"].activation_bytes
    assert used == (4 * 4096 if policy == "host" else 0)
    late, optimizer = shard_stack(make(Stack), weights=weights)
    unbounded.checkpoint_activations(late, policy)
    assert losses_of(late, optimizer) == expected
    assert optimizer.memory()["host"].activation_bytes == used
    handle.remove()
    assert sharded(early).tiers.activation_bytes == 0


@pytest.mark.every_second
@pytest.mark.parametrize("compiled", [False, "aot_eager"])
@pytest.mark.parametrize("policy", ["keep", "recompute", "host"])
def test_a_weight_that_blocks_receive_is_there_when_they_run_again(policy: str, compiled: bool | str) -> None:
    """By itself, as a unit of its own, and as a part of a larger one."""
    plain = make(WithTable)
    expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for weights, numel in (("device", 100), ("host", 100), ("host", None), ("disk", 100)):
        torch._dynamo.reset()
        with small_units(numel):
            given = shard_stack(make(WithTable), weights=weights, activations=policy, compile=compiled)
        assert losses_of(*given) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "nest", [lambda t: [t], lambda t: {"of": (t,)}, lambda t: State(t, [])], ids=["list", "dict", "class"]
)
@pytest.mark.parametrize(
    "plan", [{"activations": "host", "compile": "aot_eager"}, {"activations": "recompute"}], ids=str
)
def test_a_weight_inside_what_blocks_receive_is_kept_by_hooks_of_the_user_too(nest: Any, plan: dict[str, Any]) -> None:
    losses = []
    for makes in (
        lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.1)),
        partial(shard_stack, weights="host", **plan),
    ):
        torch._dynamo.reset()
        model = make(WithTable)
        model.nest = nest
        with small_units(100):
            model, optimizer = makes(model)
        with torch.autograd.graph.save_on_cpu() if "compile" not in plan else nullcontext():
            losses.append(losses_of(model, optimizer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_removed_policies_leave_the_engine_at_work() -> None:
    model, optimizer = shard_stack(make(Stack), weights="host")
    handle = unbounded.checkpoint_activations(model, "host")
    first = losses_of(model, optimizer)
    handle.remove()
    again = losses_of(model, optimizer)
    model, optimizer = shard_stack(make(Stack), weights="host")
    assert losses_of(model, optimizer) + losses_of(model, optimizer) == first + again


def hooks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """How many entries each dict of hooks has, and which attributes a module has, by module."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        name: {kind: len(getattr(module, kind)) for kind in kinds} | dict.fromkeys(vars(module), 0)
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("policy", [None, "keep", *POLICIES])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_an_unsharded_model_has_nothing_left_of_what_ran_it(policy: Any, place: str) -> None:
    model = make(Stack)
    before, adamw = hooks_of(model), torch.optim.AdamW(model.parameters())
    plan = {"weights": place, "optimizer": place} | ({} if policy is None else {"activations": policy})
    model, optimizer = unbounded.shard(model, adamw, plan)
    if policy is None:
        unbounded.checkpoint_activations(model, "recompute")
    losses_of(model, optimizer)
    states, tiers = weakref.ref(sharded(model)), weakref.ref(sharded(model).tiers)
    unbounded.unshard(model)
    del optimizer
    gc.collect()
    assert hooks_of(model) == before
    assert states() is None
    assert tiers() is None


def test_activations_count_as_memory_of_the_host() -> None:
    model, optimizer = shard_stack(make(Stack), activations="host")
    before = optimizer.memory()["host"]
    loss = model(tokens(rows=8, length=64))  # 24 KiB: six pages per block
    use = optimizer.memory()["host"]
    assert use.used_bytes - before.used_bytes == use.activation_bytes == 4 * 6 * 4096
    loss.backward()


def test_more_activations_than_the_hosts_budget_are_an_error_before_they_are_there() -> None:
    model, optimizer = shard_stack(make(Stack), host_bytes="32MiB", activations="host")
    spare = 32 * 2**20 - sharded(model).tiers.planned_host_bytes
    rows = spare // (3 * 64 * 12 * 4)  # three blocks would fit, the fourth does not
    with pytest.raises(BudgetError) as caught:
        model(tokens(rows=rows, length=64))
    text = str(caught.value)
    assert text.startswith("activations need ")
    assert "more host memory, but of 32.0 MiB they already have " in text
    assert "Raise host_bytes by " in text
    assert 'policy "recompute"' in text
    assert isinstance(caught.value, MemoryError)
    use = optimizer.memory()["host"]
    assert use.used_bytes <= 32 * 2**20
    del caught  # its traceback holds what was computed so far
    gc.collect()
    loss = model(tokens(rows=rows // 2, length=64))
    loss.backward()
    assert optimizer.memory()["host"].used_bytes <= 32 * 2**20


def test_states_and_buffers_keep_their_part_of_the_host() -> None:
    """What is planned for the host is kept free, even before it is allocated."""
    model, optimizer = shard_stack(
        make(Stack), host_bytes="32MiB", activations="host", weights="host", optimizer="host"
    )
    tiers = sharded(model).tiers
    assert tiers.planned_host_bytes > optimizer.memory()["host"].used_bytes
    losses_of(model, optimizer)
    assert optimizer.memory()["host"].used_bytes - tiers.activation_bytes <= tiers.planned_host_bytes


@pytest.mark.parametrize(
    ("activations", "text"),
    [
        ("hosts", "activations is 'hosts', but it must be one of 'auto', 'keep', .* Did you mean 'host'"),
        ((("layers.*", "host"),), r"the pattern 'layers.\*' in activations matches no block. The blocks are blocks.0,"),
    ],
)
def test_a_wrong_plan_is_an_error_before_the_model_is_touched(activations: Any, text: str) -> None:
    model = make(Stack)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(PlanError, match=text):
        shard_stack(model, activations=activations)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_a_plan_and_a_call_are_not_both_followed() -> None:
    model = make(Stack)
    unbounded.checkpoint_activations(model, "recompute")
    with pytest.raises(PlanError, match=r"but checkpoint_activations was called on this model. Leave out one of them"):
        shard_stack(model, activations="host")


def test_a_model_without_blocks_is_warned_about() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="activations='host' has no effect, because the model has no repeated blocks"):
        model, _ = shard_stack(model, activations="host")
    model(torch.ones(1, 3)).sum().backward()


def test_a_block_that_fails_when_it_runs_again_does_not_end_training() -> None:
    model, optimizer = shard_stack(make(Stack), weights="host", activations="host")
    runs: list[int] = []

    def fail_once(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 2:  # the recomputation
            raise ValueError("deliberate failure")

    hook = model.blocks[1].register_forward_pre_hook(fail_once)
    with pytest.raises(ValueError, match="deliberate"):
        model(tokens()).backward()
    hook.remove()
    optimizer.zero_grad()
    expected = losses_of(*shard_stack(make(Stack), weights="host"))
    assert losses_of(model, optimizer) == expected


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=17,
            use_cache=False,
        )
    )


def llama_losses(model: nn.Module, optimizer: Any, **more: Any) -> list[float]:
    found = []
    for step in range(3):
        batch = tokens(step, rows=3, length=7)
        loss = model(input_ids=batch, attention_mask=torch.ones_like(batch).tril(4), labels=batch, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_a_hugging_face_model_trains_with_its_activations_on_the_host(policy: str) -> None:
    model = llama()
    expected = llama_losses(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = shard_stack(llama(), activations=policy, host_bytes="128MiB", device_bytes="128MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llama_losses(model, optimizer) == expected
    if policy == "host":  # inputs of three blocks, mask, two rotary tables, positions: a page each
        assert optimizer.memory()["host"].activation_bytes <= 7 * 4096


def test_a_cache_that_would_be_filled_twice_is_left_out_with_a_warning() -> None:
    model = llama()
    expected = llama_losses(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = shard_stack(llama(), activations="host", host_bytes="128MiB", device_bytes="128MiB")
    with pytest.warns(
        UserWarning, match=r"caches of keys and values cannot be filled twice, so they are left out. Pass"
    ):
        assert llama_losses(model, optimizer, use_cache=True) == expected
    with torch.no_grad():
        generated = model.eval().generate(tokens(rows=1), max_new_tokens=4, do_sample=False, use_cache=True)
    assert generated.shape == (1, 9)


CACHING = {  # models whose blocks keep something else than keys and values, or call their cache otherwise
    "Qwen3Next": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "Mamba": {"num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
    "XLM": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
}


@pytest.mark.parametrize("family", CACHING)
def test_caches_of_other_kinds_are_left_out_too(family: str) -> None:
    def losses(plan: dict[str, Any] | None) -> list[float]:
        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config")(hidden_size=32, vocab_size=17, **CACHING[family])
        head = "XLMWithLMHeadModel" if family == "XLM" else f"{family}ForCausalLM"
        model: Any = getattr(transformers, head)(config)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            model, optimizer = unbounded.shard(model, optimizer, plan)
        found = []
        for step in range(2):
            batch = tokens(step, rows=3, length=7)
            loss = model(input_ids=batch, labels=batch, use_cache=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert losses({"activations": "recompute"}) == pytest.approx(losses(None), rel=1e-6)


def test_a_cache_that_blocks_are_given_by_position_is_left_out_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 17, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    plain = copy.deepcopy(model)
    expected = llama_losses(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model, optimizer = shard_stack(model, activations="recompute")
    with pytest.warns(UserWarning, match="so they are left out"):
        assert llama_losses(model, optimizer) == pytest.approx(expected)


def test_the_models_own_checkpointing_is_not_doubled() -> None:
    model, runs = llama(), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.raises(PlanError, match=r"own gradient checkpointing is on.*Call model.gradient_checkpointing_disable"):
        unbounded.checkpoint_activations(model, "host")
    handle = unbounded.checkpoint_activations(model, "recompute")
    assert handle.blocks == []
    batch = tokens()
    model.train()(input_ids=batch, labels=batch).loss.backward()
    assert len(runs) == 2 * 3


def test_the_models_own_checkpointing_turned_on_later_is_seen() -> None:
    batch = tokens()
    model, runs = llama(), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    unbounded.checkpoint_activations(model, "recompute")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()(input_ids=batch, labels=batch).loss.backward()
    assert len(runs) == 2 * 3
    model = llama()
    unbounded.checkpoint_activations(model, "host")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(
        StateError, match=r"block 'model.layers.0' has the activation policy \"host\", but the gradient"
    ):
        model.train()(input_ids=batch, labels=batch)
