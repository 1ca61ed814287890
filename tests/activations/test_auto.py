"""Models whose blocks keep what "auto" decides, on a device that the test counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.activations.models import Stack, WithDropout, WithMask, losses_of, make, tokens
from tests.activations.test_headroom import Device
from tests.activations.test_sharded import Zoo, shard_stack
from tests.zero.training import Run, assert_identical_weights, train_ours
from unbounded.activations.checkpointed import Checkpointed, attached_to
from unbounded.activations.headroom import FIRST_RATIO, Headroom
from unbounded.errors import PlanError
from unbounded.sharding import block_policies


def pretend(limit: int, host: bool = True) -> list[Headroom]:
    """Makes "auto" of models on the CPU ask a device of `limit` bytes on which every block takes 2."""
    made: list[Headroom] = []

    class Counting(Headroom):
        @torch.compiler.disable
        def note(self, outputs: Any, *, kept: bool) -> None:
            device.take(2)
            super().note(outputs, kept=kept)

        def begin(self) -> None:
            device.now = 0
            super().begin()

    device = Device()

    def make_headroom(model: nn.Module, num_blocks: int) -> Headroom:
        made.append(Counting(device, limit, num_blocks, has_host_room=lambda _: host))
        return made[-1]

    block_policies.make_headroom, block_policies.close_policy = make_headroom, lambda policy, device: policy  # type: ignore[assignment]
    return made


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("make_headroom", "close_policy"):
        monkeypatch.setattr(block_policies, name, getattr(block_policies, name))


def run_auto(rank: int, world_size: int, kind: Any, plan: dict[str, Any]) -> list[Run]:
    """The model as it is; then under "auto", where each rank has a different amount of room."""
    before = block_policies.make_headroom, block_policies.close_policy
    plain = train_ours(rank, world_size, Zoo(kind), plan)
    try:
        pretend([2**40, 0, 4000, 2**40][rank])
        return [plain, train_ours(rank, world_size, Zoo(kind), plan)]
    finally:
        block_policies.make_headroom, block_policies.close_policy = before


@pytest.mark.parametrize("kind", [Stack, WithMask, WithDropout], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 2), (2, 3), (4, 3)])
def test_ranks_may_decide_differently(ranks: Any, kind: Any, world_size: int, stage: int) -> None:
    for plain, auto in ranks(world_size, run_auto, kind, {"stage": stage, "weights": "device"}):
        assert auto.losses == plain.losses
        assert_identical_weights(auto, plain)


@pytest.mark.parametrize("limit", [0, 2**13, 2**40])
@pytest.mark.parametrize("host", [True, False])
def test_losses_are_those_of_the_plain_model(limit: int, host: bool) -> None:
    expected = losses_of(*shard_stack(make(Stack)))
    made = pretend(limit, host)
    model, optimizer = shard_stack(make(Stack))
    assert losses_of(model, optimizer) == expected
    assert made[0].num_kept == (4 if limit == 2**40 else 0)
    assert (optimizer.memory()["host"].activation_bytes > 0) == (limit < 2**40 and host)  # this one never trims


def test_a_model_that_is_compiled_whole_has_the_blocks_that_keep_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    def run() -> list[Any]:
        torch._dynamo.reset()
        graphs.clear()
        model, optimizer = shard_stack(make(Stack))
        losses = losses_of(torch.compile(model, backend=backend), optimizer)
        return [losses, [*graphs]]

    plain = run()
    assert len(plain[1]) == 1
    made = pretend(2**40)
    assert run() == plain
    assert made[0].num_kept == 4


def counts(model: nn.Module) -> Counter[str]:
    return Counter(block.policy for block in attached_to(model))


def test_what_a_plan_leaves_out_is_auto_on_a_gpu_and_keeps_on_a_cpu() -> None:
    model, _ = shard_stack(make(Stack))
    assert counts(model) == {}
    pretend(0)
    model, optimizer = shard_stack(make(Stack))
    assert counts(model) == {"auto": 4}
    assert "activations={auto: 4 blocks}" in repr(optimizer.plan)
    model, _ = shard_stack(make(Stack), activations=(("blocks.0", "keep"), ("blocks.1", "host"), ("*", "auto")))
    assert counts(model) == {"host": 1, "auto": 2}


def test_a_policy_of_ones_own_replaces_auto() -> None:
    pretend(2**40)
    model, _ = shard_stack(make(Stack))
    unbounded.checkpoint_activations(model, "recompute")
    assert counts(model) == {"recompute": 4}
    some, _ = shard_stack(make(Stack))
    unbounded.checkpoint_activations(some, "host", blocks="blocks.1")
    unbounded.checkpoint_activations(some, "keep", blocks="blocks.2")
    assert counts(some) == {"auto": 2, "host": 1}
    with pytest.raises(PlanError, match="already has the activation policy 'recompute'"):
        unbounded.checkpoint_activations(model, "host")
    part, optimizer = shard_stack(make(Stack))
    expected = losses_of(*shard_stack(make(Stack)))
    handle = unbounded.checkpoint_activations(part.blocks, "recompute", [part.blocks[2]])
    assert counts(part) == {"auto": 3, "recompute": 1}
    assert losses_of(part, optimizer) == expected
    handle.remove()
    assert part.blocks[2].__dict__.get("_compiled_call_impl") is None  # nor is "auto" below it
    early = make(Stack)
    unbounded.checkpoint_activations(early, "host")
    early, _ = shard_stack(early)
    assert counts(early) == {"host": 4}


def test_auto_that_was_given_before_sharding_has_the_budget_of_the_plan() -> None:
    made = pretend(2**40)
    model = make(Stack)
    unbounded.checkpoint_activations(model, "auto")
    model, optimizer = shard_stack(model)
    assert len(made) == 2
    assert {block.headroom for block in attached_to(model)} == {made[1]}
    losses_of(model, optimizer)
    assert made[1].num_kept == 4


def test_a_model_that_checkpoints_itself_is_left_to_it() -> None:
    pretend(2**40)
    model = make(Stack)
    for block in model.blocks:
        block.gradient_checkpointing = True  # type: ignore[assignment]
    model, _ = shard_stack(model)
    assert counts(model) == {}


class Normed(Stack):
    class block(Stack.block):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.batch = nn.SyncBatchNorm(12)

        def forward(self, x: torch.Tensor) -> Any:
            return self.batch(self.mix(x).transpose(1, 2)).transpose(1, 2)


def test_blocks_that_wait_for_other_ranks_never_run_again_on_one_of_them() -> None:
    pretend(0)
    model, _ = shard_stack(Normed())
    assert counts(model) == {}


def test_caches_stay_where_activations_are_kept(recwarn: pytest.WarningsRecorder) -> None:
    given: list[Any] = []

    class Cached(nn.Module):
        def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
            given.append(past_key_values)
            return x * 2

    block, cache = Cached(), object()
    Checkpointed("block", block, "auto", None, Headroom(Device(), 2**40, 1)).attach()  # type: ignore[arg-type]
    block(torch.ones(3, requires_grad=True), past_key_values=cache)
    assert given == [cache]
    assert not recwarn.list


def test_a_part_of_the_model_called_by_itself_begins_a_forward() -> None:
    headroom = Headroom(Device(), int(2**20 * (FIRST_RATIO * 2 + 2) * 8), 2)
    for _ in range(3):
        for _ in range(2):
            assert headroom.choose(torch.empty(2**20, dtype=torch.uint8)) == "keep"
            headroom.note(tokens(), kept=True)
        assert headroom.num_kept == 2
