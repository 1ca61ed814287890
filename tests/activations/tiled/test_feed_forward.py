"""Feed-forward layers over tiles of the sequence: where they run, and that results are those of the whole layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.activations.models import Layer, Stack, losses_of, make, tokens
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.tiled import feedforward
from unbounded.activations.tiled.feedforward import FeedForward, Sizes
from unbounded.errors import PlanError

PRELOAD_IN_RANKS = ["transformers"]


def tile_small(rows: int = 4) -> None:
    """Makes tiles of this many rows, even of short inputs, whatever the budget."""
    feedforward.LEAST_TILE_ROWS = rows
    feedforward.WHOLE_PARTS = feedforward.TILE_PARTS = 2**40


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_TILE_ROWS", "WHOLE_PARTS", "TILE_PARTS"):
        monkeypatch.setattr(feedforward, name, getattr(feedforward, name))
    tile_small()


def llama(kind: str = "Llama", **sizes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "vocab_size": 17, "use_cache": False}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**config, **sizes}))


def watch(model: nn.Module) -> list[int]:
    """The rows that every run of a feed-forward layer is given."""
    rows: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].numel() // args[0].shape[-1]))
    return rows


def train(model: nn.Module, optimizer: Any, rank: int = 0) -> list[float]:
    found = []
    for step in range(2):
        for micro in range(2):
            batch = tokens(10 * rank + 2 * step + micro, rows=2, length=5)
            loss = model(input_ids=batch, labels=batch).loss
            (loss / 2).backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def shard(model: nn.Module, **plan: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unbounded.shard(model, optimizer, {"device_bytes": "64MiB", "host_bytes": "256MiB", **plan})


def assert_same(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["recompute", "host"])
@pytest.mark.parametrize("weights", ["device", "host"])
def test_results_are_those_of_the_whole_layer(policy: str, weights: str) -> None:
    plain = llama()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    ours = llama()
    rows = watch(ours)
    ours, optimizer = shard(ours, activations=policy, weights=weights)
    assert train(ours, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(ours.state_dict(), plain)
    # 10 tokens in tiles of 4, 4 and 2: in the forward, when the block runs again (the last is not needed then), and
    # each once more for its backward; 3 blocks, 4 microbatches.
    assert sorted(set(rows)) == [2, 4]
    assert len(rows) == 4 * 3 * (3 + 2 + 3)


def test_a_backward_over_tiles_holds_the_weights_of_a_few_blocks() -> None:
    """A tile's backward runs its layer again, inside that of the block, and keeps nothing for later."""
    model = llama(num_hidden_layers=12)
    block_bytes = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    model, optimizer = shard(model, activations="recompute", weights="host", optimizer="host", gradients="host")
    held = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: held.append(optimizer.memory()["device"].used_bytes))
    train(model, optimizer)
    assert max(held) - min(held) <= 4 * block_bytes  # the running one, two being fetched, one being freed


def train_on_ranks(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    tile_small()
    model, optimizer = shard(llama(), stage=stage, activations="recompute")
    assert attached_to(model)[0].feed_forwards
    train(model, optimizer, rank)
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_several_ranks_and_stages(ranks: Any, stage: int) -> None:
    models = [llama(), llama()]
    for step in range(2):
        for rank, model in enumerate(models):
            for micro in range(2):
                batch = tokens(10 * rank + 2 * step + micro, rows=2, length=5)
                (model(input_ids=batch, labels=batch).loss / 2).backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = other.grad = (one.grad + other.grad) / 2  # type: ignore[operator]
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    for state in ranks(2, train_on_ranks, stage):
        assert_same(state, models[0])


def test_blocks_that_keep_are_left_whole_and_so_are_short_sequences() -> None:
    batch = tokens(rows=2, length=5)
    kept = llama()
    rows = watch(kept)
    unbounded.checkpoint_activations(kept, (("model.layers.0", "recompute"), ("*", "keep")))
    kept(input_ids=batch, labels=batch).loss.backward()
    assert rows.count(10) == 2
    assert rows.count(4) == 2 * 3
    tile_small(rows=10)
    short = llama()
    rows = watch(short)
    unbounded.checkpoint_activations(short, "recompute")
    short(input_ids=batch, labels=batch).loss.backward()
    assert set(rows) == {10}


def test_a_layer_is_tiled_when_it_takes_more_than_its_part_of_the_budget() -> None:
    layer = FeedForward(llama().model.layers[0].mlp, Sizes.within(1))
    layer.sizes = Sizes(whole_bytes=2 * (48 + 48 + 32) * 4 * 1000, tile_bytes=2 * (48 + 48 + 32) * 4 * 300)
    assert layer.tile_rows(torch.empty(10, 100, 32)) is None
    assert layer.tile_rows(torch.empty(10, 101, 32)) == 300


def test_random_numbers_are_drawn_as_ever() -> None:
    """Dropout inside a layer keeps it whole in training, but not in evaluation."""
    import transformers

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=17))
    unbounded.checkpoint_activations(model, "recompute")
    [first, _] = attached_to(model)
    [layer] = first.feed_forwards
    assert not layer.can_run_apart()
    model.eval()
    assert layer.can_run_apart()


class Mixing(Layer):
    """The part that `tiled` names in tests. It returns one row, whatever it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.mixer = Mean()

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x) + self.mixer(x)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2).mean(0, keepdim=True)


class Mixed(Stack):
    block = Mixing


def test_other_layers_are_named_by_pattern() -> None:
    expected = losses_of(model := make(Mixed), torch.optim.SGD(model.parameters(), lr=0.1))
    ours = make(Mixed)
    rows: list[int] = []
    for block in ours.blocks:
        block.inner.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    unbounded.checkpoint_activations(ours, "recompute", tiled="blocks.*.inner")
    found = losses_of(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    assert found == pytest.approx(expected, rel=1e-6)
    assert set(rows) == {4, 2}
    unbounded.checkpoint_activations(untiled := make(Mixed), "recompute", tiled=None)
    assert losses_of(untiled, torch.optim.SGD(untiled.parameters(), lr=0.1)) == expected


def test_compiled_blocks_leave_their_graph_for_tiles_only_where_they_are_needed() -> None:
    torch._dynamo.reset()
    expected = losses_of(model := make(Mixed), torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (4, 10):
        tile_small(rows)
        ours = make(Mixed)
        for block in ours.blocks:
            block.compile(backend="aot_eager")
        unbounded.checkpoint_activations(ours, "recompute", tiled="blocks.*.inner")
        assert losses_of(ours, torch.optim.SGD(ours.parameters(), lr=0.1)) == pytest.approx(expected, rel=1e-6)


def test_layers_that_cannot_be_tiled_are_one_clear_error() -> None:
    model = make(Mixed)
    handle = unbounded.checkpoint_activations(model, "recompute", tiled=["blocks.*.mixer"])
    with pytest.raises(
        PlanError, match=r"layer Mean was given \(4, 12\) and returned \(1, 12\), so it cannot run over"
    ):
        model(tokens()).backward()
    handle.remove()
    assert "_compiled_call_impl" not in vars(model.blocks[0].mixer)
    with pytest.raises(
        PlanError, match=r"the pattern 'blocks.\*.mlp' in tiled matches no module inside the blocks, whi"
    ):
        unbounded.checkpoint_activations(model, "recompute", tiled=["blocks.*.mlp"])
