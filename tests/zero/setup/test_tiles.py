"""Layers that run as tiles: results, names, states and checkpoints are those of whole layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import unbounded
from unbounded.errors import BudgetError, PlanError, StateError
from unbounded.sharding.running import sharded
from unbounded.zero.parameters.tiles import tiled_of

WIDTH, CLASSES = 32, 37  # 37 rows: the last tile is a short one
INNER = 80
LIMIT = 4096  # bytes: 32 rows of 32 in fp32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding with a padding row, blocks, a head with a bias that may share the embedding's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, padding_idx=20)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net(tied=tied).to(dtype)


def tokens(seed: int) -> Tensor:
    return torch.randint(CLASSES, (2, 9), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Any, seeds: range = range(3), rank: int = 0) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(tokens(seed + 100 * rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def shard(model: nn.Module, own: Any = None, **plan: Any) -> tuple[nn.Module, Any]:
    budgets = {"device_bytes": "64MiB", "host_bytes": "256MiB", "disk_bytes": "64MiB"}
    return unbounded.shard(model, own or adam(model), {**budgets, **plan})


def tiled(limit: int = LIMIT, **plan: Any) -> tuple[nn.Module, Any]:
    model = build()
    unbounded.tile(model, limit)
    return shard(model, **plan)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=1e-5, atol=1e-6)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


PLANS: list[dict[str, Any]] = [{}, {"weights": "host", "optimizer": "host"}, {"weights": "disk", "optimizer": "disk"}]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", [None, *PLANS], ids=str)
def test_training_is_that_of_whole_layers(tied: bool, plan: dict[str, Any] | None) -> None:
    plain = build(tied=tied)
    expected = train(plain, adam(plain))
    model = build(tied=tied)
    counts = unbounded.tile(model, LIMIT)
    assert counts["embedding.weight"] == 2
    assert counts["blocks.0.up.weight"] == 3
    assert counts["blocks.0.down.weight"] == 4
    assert ("head.weight" in counts) is not tied
    optimizer: Any = adam(model)
    if plan is not None:  # without: tiles of a model in plain PyTorch
        model, optimizer = shard(model, optimizer, **plan)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert_close(model.state_dict(), plain.state_dict())


def train_on_ranks(rank: int, world_size: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = tiled(stage=stage)
    return train(model, optimizer, rank=rank), model.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_tiles_on_several_ranks(ranks: Any, stage: int) -> None:
    models = [build(), build()]
    optimizers = [adam(model) for model in models]
    for seed in range(3):
        for rank, model in enumerate(models):
            model(tokens(seed + 100 * rank)).backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = other.grad = (one.grad + other.grad) / 2  # type: ignore[operator]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for _, state in ranks(2, train_on_ranks, stage):
        assert_close(state, models[0].state_dict())


@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_blocks_with_tiles_inside_take_activation_policies(policy: str) -> None:
    expected = train(*tiled(weights="host"))
    model, optimizer = tiled(weights="host", activations=policy)
    assert train(model, optimizer) == expected


def test_tiles_come_and_go_in_turn() -> None:
    """A few tiles are gathered at once, not the layer: here two at a time, 16 KiB in all."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))  # 64 KiB each
    unbounded.tile(model, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = unbounded.shard(
        model, optimizer, {"weights": "host", "prefetch_units": 1, "device_bytes": "1MiB", "host_bytes": "64MiB"}
    )
    gathering, peak = sharded(model).engine.gathering, 0
    count, held = gathering._count_bytes, 0

    def watch(num_bytes: int) -> None:
        nonlocal held, peak
        held += num_bytes
        peak = max(peak, held)
        count(num_bytes)

    gathering._count_bytes = watch
    model(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    assert held == 0
    assert 4096 <= peak <= 4 * 4096


def test_gradients_are_those_of_the_whole_weight_and_freezing_freezes_all_of_it() -> None:
    plain = build()
    plain(tokens(0)).backward()
    model, optimizer = tiled()
    assert model.embedding.weight.grad is None
    model(tokens(0)).backward()
    torch.testing.assert_close(model.embedding.weight.grad, plain.embedding.weight.grad)
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    assert float(optimizer.clip_grad_norm_(torch.inf)) == pytest.approx(expected, rel=1e-5)
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(StateError, match="would write to a copy of the gradient of a tiled weight"):
        model.embedding.weight.grad.add_(1)
    for each in (plain, model):
        each.embedding.weight.grad.data /= 2
        each.blocks[0].up.weight.grad.data = torch.full_like(each.blocks[0].up.weight.grad, 0.01)
        with torch.no_grad():
            each.blocks[1].up.weight.set_(torch.full_like(each.blocks[1].up.weight, 0.02))
    optimizer.step()
    adam(plain).step()
    assert_close(model.state_dict(), plain.state_dict())
    optimizer.zero_grad()
    before = model.state_dict()
    model.blocks[0].up.weight.requires_grad_(False)
    train(model, optimizer)
    after = model.state_dict()
    assert torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    assert not torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])


@pytest.mark.parametrize("weights", ["device", "host"])
def test_whole_values_can_be_read_and_written(weights: str) -> None:
    model, _ = tiled(weights=weights)
    plain = build()
    weight = model.head.weight
    assert weight is model.embedding.weight
    assert weight.shape == (CLASSES, WIDTH)
    assert repr(weight) == f"Parameter(shape=({CLASSES}, {WIDTH}), dtype=torch.float32, in 2 tiles)"
    with torch.no_grad():
        assert torch.equal(weight * 1, plain.head.weight)
    with unbounded.full_params(model):
        assert torch.equal(weight.detach(), plain.head.weight)
        weight.mul_(2)
        weight.data[35] = 7.0
        nn.init.zeros_(model.blocks[0].up.weight)
    with torch.no_grad():
        plain.head.weight.mul_(2)
        plain.head.weight[35] = 7.0
        plain.blocks[0].up.weight.zero_()
    assert_equal(model.state_dict(), plain.state_dict())
    other = build(tied=True)
    other.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
    model.load_state_dict(other.state_dict())
    assert_equal(model.state_dict(), other.state_dict())
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        weight.mul_(2)
    with torch.no_grad():
        weight.mul_(2)
        other.head.weight.mul_(2)
    assert_equal(model.state_dict(), other.state_dict())


def write_through_views(model: nn.Module, held: torch.Tensor) -> None:
    weight = model.blocks[0].up.weight  # type: ignore[index, union-attr]
    with torch.no_grad():
        held.add_(1)
        weight.data[0].zero_()
        weight.view(-1)[5:9].mul_(3)
        weight.t()[1].sub_(1)
        weight.detach()[2].fill_(0.5)
        first, second = weight.chunk(2)
        second.mul_(2)
        first[1:3] = second[:2]
        weight.flatten().copy_(weight.flatten() * 1.5)


@pytest.mark.parametrize("weights", ["device", "host", "disk"])
def test_what_is_written_to_views_reaches_the_tiles(weights: str) -> None:
    model, optimizer = tiled(weights=weights)
    plain = build()
    plain_optimizer = adam(plain)
    for each, steps in ((model, optimizer), (plain, plain_optimizer)):
        held = each.blocks[0].up.weight.data[3]
        for start in (0, 3):
            train(each, steps, range(start, start + 3))
            write_through_views(each, held)  # what is held of a weight has its current values
    assert_close(model.state_dict(), plain.state_dict())
    with unbounded.full_params(model):
        write_through_views(model, model.blocks[0].up.weight.data[3])
    write_through_views(plain, plain.blocks[0].up.weight.data[3])
    assert_close(model.state_dict(), plain.state_dict())
    model(tokens(9)).backward()
    with pytest.raises(StateError, match="would write to a copy of the gradient of a tiled weight"):
        model.blocks[0].up.weight.grad[0].zero_()


@pytest.mark.parametrize("format", ["exact", "compact"])
def test_checkpoints_load_across_tilings(tmp_path: Path, format: str) -> None:
    """Saved from tiles of one size, loaded whole and into tiles of another: the same bits go on the same way."""
    plan = {"precision": "bf16", "optimizer_format": format, "weights": "host", "optimizer": "host"}
    first, optimizer = tiled(**plan)
    train(first, optimizer)
    unbounded.save(tmp_path / "tiles", first, optimizer)
    state = first.state_dict()
    expected = train(first, optimizer, range(3, 5))
    for number, limit in enumerate((LIMIT, 2 * LIMIT, 2**30)):
        folder = tmp_path / "tiles"
        for name in ("tiles", f"copy{number}"):
            model, optimizer = tiled(limit, **(plan | ({"optimizer": "disk"} if number == 1 else {})))
            unbounded.load(folder, model, optimizer)
            if name == "tiles":
                unbounded.save(tmp_path / f"copy{number}", model, optimizer)
                folder = tmp_path / f"copy{number}"
        assert_equal(model.state_dict(), state)
        assert train(model, optimizer, range(3, 5)) == pytest.approx(expected, rel=1e-2)


def test_a_checkpoint_of_tiles_is_that_of_the_whole_model_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = tiled(optimizer="host")
    model(tokens(0)).backward()  # with a gradient that waits for its step
    unbounded.save(tmp_path / "saved", model, optimizer)
    optimizer.step()
    expected = model.state_dict()
    for limit in (2 * LIMIT, 2**30):
        other, steps = tiled(limit, optimizer="host")
        with unbounded.full_params(other):
            for parameter in other.parameters():
                parameter.zero_()
        unbounded.load(tmp_path / "saved", other, steps)
        steps.step()
        assert_equal(other.state_dict(), expected)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = tiled()
    unbounded.save(tmp_path / "saved", model, optimizer)
    other = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH))
    unbounded.tile(other, LIMIT)
    other, optimizer = shard(other)
    with pytest.raises(unbounded.CheckpointError, match="not in the checkpoint"):
        unbounded.load(tmp_path / "saved", other, optimizer)


def test_an_export_has_whole_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer = tiled(weights="host")
    train(model, optimizer)
    unbounded.export(tmp_path / "out", model)
    [file] = (tmp_path / "out").glob("*.safetensors")
    exported, state = load_file(file), model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in exported.items())
    assert {"embedding.weight", "blocks.1.down.weight", "head.bias"} <= set(exported)


def meta() -> Net:
    with torch.device("meta"):
        return Net(tied=True)


def test_a_model_on_the_meta_device_is_initialised_tile_by_tile() -> None:
    model = meta()
    unbounded.tile(model, LIMIT)
    torch.manual_seed(0)
    model, optimizer = shard(model)
    state = model.state_dict()
    assert model.head.weight.device.type == "cpu"
    assert torch.isfinite(state["embedding.weight"]).all()
    bound = WIDTH**-0.5
    up = state["blocks.0.up.weight"]
    assert float(up.abs().max()) <= bound
    assert float(up.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert float(state["head.bias"].abs().max()) <= bound
    train(model, optimizer)


def test_pretrained_weights_are_read_into_tiles(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = build()
    save_file(
        {n: v.contiguous() for n, v in source.state_dict().items() if n != "head.weight"}, tmp_path / "m.safetensors"
    )
    model = meta()
    unbounded.tile(model, LIMIT)
    model, _ = unbounded.shard(model, None, {"device_bytes": "64MiB", "host_bytes": "64MiB"}, weights=tmp_path)
    assert_equal(model.state_dict(), source.state_dict())


def test_states_of_an_optimizer_that_has_stepped_go_with_their_rows() -> None:
    plain = build()
    optimizer = adam(plain)
    train(plain, optimizer)
    model = build()
    unbounded.tile(model, LIMIT)
    own = adam(model)
    train(model, own)
    model, own = shard(model, own, optimizer="host")
    train(model, own, range(3, 6))
    train(plain, optimizer, range(3, 6))
    assert_close(model.state_dict(), plain.state_dict())


def test_a_layer_that_does_not_fit_is_tiled_by_itself() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))  # 128 KiB each
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    model.load_state_dict(plain.state_dict())
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    plan = {"device_bytes": "256KiB", "host_bytes": "64MiB", "weights": "host", "optimizer": "host"}
    with pytest.raises(BudgetError):  # a tile does not fit either, and the attempt leaves nothing
        unbounded.shard(model, steps[0], plan | {"device_bytes": "8KiB", "host_bytes": "1KiB"})
    model, steps[0] = unbounded.shard(model, steps[0], plan)  # type: ignore[assignment]
    assert len(tiled_of(model[0]).bounds) == 8  # of 16 KiB, a sixteenth of the budget
    for each, optimizer in zip((model, plain), steps, strict=True):
        each(torch.linspace(-1, 1, 128).view(2, 64)).square().sum().backward()
        optimizer.step()
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("module", "limit", "message"),
    [
        (
            nn.Linear(64, 10),
            100,
            r"the smallest tile of 0.weight \(2 of its 10 rows\) takes 512 B",
        ),
        (
            nn.Linear(3, 256),
            1000,
            r"0.weight \(128 of its 256 rows\) takes 1.5 KiB. .* least 1536",
        ),
        (nn.Conv1d(8, 64, 3), 1024, r"0.weight takes 6.0 KiB, more than max_bytes=1.0 KiB, but Conv1d is neither"),
        (nn.Embedding(64, 64, max_norm=1.0), 1024, "an embedding with max_norm or scale_grad_by_freq looks at all"),
        (nn.Bilinear(8, 8, 8), 1024, "Bilinear is neither nn.Linear nor nn.Embedding"),
    ],
    ids=["row", "alignment", "convolution", "max_norm", "bilinear"],
)
def test_what_cannot_be_tiled_is_one_clear_error(module: nn.Module, limit: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        unbounded.tile(nn.Sequential(module), limit)


def test_a_model_that_is_sharded_is_not_tiled_any_more() -> None:
    model, _ = shard(build())
    with pytest.raises(PlanError, match=r"already sharded. Call unbounded.tile before shard"):
        unbounded.tile(model, LIMIT)


def test_indices_outside_an_embedding_are_an_error_as_ever() -> None:
    model = nn.Sequential(nn.Embedding(64, 32))
    unbounded.tile(model, LIMIT)
    assert torch.equal(model(torch.tensor([[63, 0]])), model[0].weight[[63, 0]][None])
    with pytest.raises(IndexError, match="outside the 64 rows"):
        model(torch.tensor([64]))


def test_gradient_hooks_expect_the_whole_and_are_refused() -> None:
    model = build()
    model.embedding.weight.register_hook(lambda grad: grad)
    with pytest.raises(PlanError, match="a gradient hook of it expects the whole gradient, so it cannot be tiled"):
        unbounded.tile(model, LIMIT)
    model, _ = tiled()
    with pytest.raises(StateError, match="a tiled weight has a gradient hook, but its gradient comes in parts"):
        model.embedding.weight.register_hook(lambda grad: grad)


class Layers(nn.Module):
    """Tiled layers in odd places: in a module that is never called, in the first layer of an encoder, with a child."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Module()
        self.held.up = nn.Linear(8, WIDTH)
        self.held.across = nn.Linear(WIDTH, 2 * INNER)
        self.held.across.extra = nn.Linear(4, 4)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * INNER, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.held.up(x)
        return self.encoder(x + self.held.across(x)[..., :WIDTH])


def build_linear() -> nn.Module:
    return nn.Linear(8, 8 * INNER)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("build_model", [Layers, build_linear])
def test_tiled_layers_are_found_wherever_they_are(build_model: Any, plan: dict[str, Any]) -> None:
    found = []
    for is_tiled in (False, True):
        torch.manual_seed(3)
        model: nn.Module = build_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_tiled:
            unbounded.tile(model, 3 * WIDTH * WIDTH * 4)  # what the projection of attention takes
            model, optimizer = shard(model, optimizer, **plan)
        for seed in range(2):
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    assert_close(found[1], found[0])


def ask_autograd(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The gradients of all weights, those of a penalty on them, and weights trained by the gradients of a few."""
    weights = list(model.parameters())
    grads = torch.autograd.grad(model(tokens(0)), weights, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    second = torch.autograd.grad(penalty + model.blocks[0].up.weight.norm(), weights, allow_unused=True)
    chosen = [model.blocks[1].up.weight, model.head.weight, model.blocks[0].norm.bias]
    for seed in range(2):
        model(tokens(seed)).backward(inputs=chosen)
        assert [weight.grad is None for weight in weights] == [all(w is not c for c in chosen) for w in weights]
        optimizer.step()
        optimizer.zero_grad()
    return [*(grad.detach() for grad in grads), *second, *model.state_dict().values()]


def ask_on_ranks(rank: int, world_size: int, plan: dict[str, Any]) -> list[Tensor]:
    return ask_autograd(*tiled(**plan))


@pytest.mark.parametrize(("world_size", "plan"), [*((1, plan) for plan in PLANS), (2, {"stage": 2}), (2, {"stage": 3})])
def test_autograd_is_asked_for_whole_weights(ranks: Any, world_size: int, plan: dict[str, Any]) -> None:
    plain = build()
    expected = ask_autograd(plain, adam(plain))
    for found in ranks(world_size, ask_on_ranks, plan):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", ["tied", "pruned", "parametrized"])
def test_a_tiled_weight_that_was_replaced_is_refused(change: str) -> None:
    model, _ = tiled()
    layer = model.blocks[0].up
    if change == "tied":
        layer.weight = model.blocks[1].up.weight
    elif change == "pruned":
        prune.l1_unstructured(layer, "weight", 0.5)
    else:
        layer._parameters.pop("weight")
        layer.weight = torch.ones(INNER, WIDTH)
    with pytest.raises(StateError, match=r"'blocks\.0\.up\.weight' was replaced or removed after `shard`"):
        model(tokens(0))


@pytest.mark.parametrize("weights", ["device", "disk"])
def test_tiled_layers_are_initialised_again_by_their_own_methods(weights: str) -> None:
    model, optimizer = tiled(weights=weights)
    plain = build()
    plain_optimizer = adam(plain)
    for each, steps in ((model, optimizer), (plain, plain_optimizer)):
        train(each, steps)
        torch.manual_seed(5)
        each.blocks[0].up.reset_parameters()
        nn.init.normal_(each.blocks[1].up.weight, std=0.1)
        nn.init.constant_(each.blocks[1].down.weight, 0.01)
    assert_close(model.state_dict(), plain.state_dict())
    assert train(model, optimizer) == pytest.approx(train(plain, plain_optimizer), rel=1e-5)


def test_a_tiled_weight_refuses_what_other_sharded_weights_refuse() -> None:
    model, _ = tiled()
    weight = model.embedding.weight
    with pytest.raises(StateError, match=r"register_multi_grad_hook was given .*'embedding\.weight'"):
        torch.autograd.graph.register_multi_grad_hook([weight], lambda grads: None)
    with pytest.raises(StateError, match=r"share_memory\(\) cannot be done to .*'embedding\.weight'"):
        weight.share_memory_()
    with pytest.raises(StateError, match="was expanded as itself"):
        weight.expand_as(weight)
    with pytest.raises(StateError, match=r"safetensors was given .*'embedding\.weight'"):
        safetensors.torch.save({"weight": weight})


def test_a_copy_of_a_sharded_model_is_whole_and_trains() -> None:
    model, _ = tiled(weights="host")
    twin = copy.deepcopy(model.blocks[0])
    assert type(twin.up.weight) is nn.Parameter
    twin(torch.ones(2, WIDTH)).sum().backward()
    assert twin.up.weight.grad is not None
