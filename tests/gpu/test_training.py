"""Training on a GPU with states on every tier, compared with plain PyTorch and with each other."""

from __future__ import annotations

import copy
import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero import training
from tests.zero.drafting import drafting
from tests.zero.passes.test_streams import Fork
from unbounded.planner import balance
from unbounded.sharding.running import sharded
from unbounded.tiers.arena import HostArena
from unbounded.tiers.array import MemoryArray
from unbounded.tiers.driver import count_device
from unbounded.tiers.pool import BufferPool
from unbounded.zero.gradients.gradient_array import GradientArray
from unbounded.zero.step.early.drafts import Drafts
from unbounded.zero.step.relocation import Relocation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = ("weights", "gradients", "optimizer")
TIERS = [
    {},
    {"weights": "host", "optimizer": "host"},
    {"weights": "device", "optimizer": "host"},
    {"weights": "host", "optimizer": "device"},
    {"weights": "disk", "optimizer": "disk"},
    {"weights": "disk", "optimizer": "disk", "gradients": "disk"},
    {"weights": (("blocks.[01]", "device"), ("*", "host")), "optimizer": (("blocks.0", "device"), ("*", "disk"))},
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 300)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool, accumulate: int = 1, lag: int = 0
) -> list[float]:
    """`lag`: cycles by which the stream is behind the host when a backward begins."""
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for _ in range(accumulate):
            tokens = torch.randint(0, 300, (4, 32), generator=generator).cuda()
            loss = model(tokens) / accumulate
            torch.cuda._sleep(lag)
            loss.backward()
        if clip and hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.5)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("plan", TIERS, ids=str)
def test_fp32_training_equals_plain_pytorch_on_every_tier(plan: dict, accumulate: int) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).cuda()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), True, accumulate)
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    torch.testing.assert_close(train(model, optimizer, True, accumulate), expected, rtol=2e-5, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name].cpu(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("on_other_stream", [False, True])
@pytest.mark.parametrize("plan", [plan for plan in TIERS if "gradients" not in plan], ids=str)
def test_units_that_are_updated_inside_the_backward_train_as_in_plain_pytorch(
    plan: dict, on_other_stream: bool
) -> None:
    """Also on a stream that was not current in `shard`, and that is far behind the host."""
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).cuda()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), False)
    options = {"gradients": "none", **plan}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), options)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if on_other_stream else torch.cuda.current_stream()):
        found = train(model, optimizer, False, lag=20_000_000)
        optimizer.wait()
        torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name].cpu(), rtol=1e-3, atol=2e-5)


def test_a_pinned_batch_may_be_written_to_as_soon_as_the_forward_has_returned() -> None:
    torch.manual_seed(0)
    model, _ = unbounded.shard(Model())
    batch = torch.randint(0, 300, (4, 32))
    with torch.no_grad():
        expected = model(batch).item()
        pinned = batch.pin_memory()
        torch.cuda._sleep(20_000_000)
        found = model(pinned)
        pinned.zero_()
    assert found.item() == expected


class Alone(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Apart:
    """Two streams that are far behind the host in turns."""

    def __init__(self) -> None:
        self.main, self.side = torch.cuda.current_stream(), torch.cuda.Stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            yield


def on_two_streams(model: nn.Module, optimizer: torch.optim.Optimizer, streams: Any) -> list[Any]:
    """Blocks run on both, and so do evaluations, which in plain PyTorch nobody has to wait for."""
    found: list[Any] = []
    for step in range(4):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cuda()
        streams.side.wait_stream(streams.main)
        loss = model(x)
        with torch.no_grad(), torch.cuda.stream(streams.side):
            found.append(model(x))
        with torch.cuda.stream(streams.side):
            other = model(x)
        other.register_hook(lambda _: torch.cuda._sleep(20_000_000))
        streams.main.wait_stream(streams.side)
        loss.backward()
        other.backward()  # called on the first stream, which torch makes wait for the gradients
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss)
    torch.cuda.synchronize()
    return [*map(torch.Tensor.item, found), *(value.cpu() for value in model.state_dict().values())]


@pytest.mark.parametrize("plan", [*TIERS[:4], {"weights": "host", "activations": "recompute"}], ids=str)
def test_streams_of_the_users_own_train_as_in_plain_pytorch(plan: dict[str, Any]) -> None:
    streams = Apart()
    for kind in (lambda: Fork(streams), Alone):  # the second has one parameter, so one leaf
        torch.manual_seed(0)
        model: nn.Module = kind()
        reference = kind().cuda()
        reference.load_state_dict(model.state_dict())
        expected = on_two_streams(reference, torch.optim.SGD(reference.parameters(), lr=0.1), streams)
        model, optimizer = training.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        torch.testing.assert_close(on_two_streams(model, optimizer, streams), expected, rtol=2e-5, atol=1e-6)


def train_with_muon(plan: dict[str, Any], lag: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model(width=512).to(torch.bfloat16)
    inner = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    chosen = set(map(id, inner))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers = [torch.optim.Muon(inner, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    model, optimizer = unbounded.shard(model, optimizers, plan)
    losses = train(model, optimizer, True, lag=lag)
    optimizer.wait()
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", TIERS[1:], ids=str)
def test_whole_tensors_are_updated_with_the_same_bits_wherever_their_states_live(plan: dict) -> None:
    """They are read, updated and written on three streams, which may all be behind the host."""
    expected, weights = train_with_muon({}, lag=0)
    found, others = train_with_muon(plan, lag=20_000_000)
    assert found == expected
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("gradients", ["device", "host", "disk", (("blocks.[01]", "device"), ("*", "host"))])
def test_held_gradients_are_clipped_by_what_the_device_computes(gradients: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).cuda()
    model, optimizer = unbounded.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"optimizer": "host", "gradients": gradients}
    )
    tokens = torch.randint(0, 300, (4, 32)).cuda()
    held = []
    for one in (reference, model):
        one(tokens).backward()
        assert all(parameter.grad.device == parameter.device for parameter in one.parameters())
        held.append([parameter.grad.data for parameter in one.parameters()])
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        nn.utils.clip_grad_norm_(list(one.parameters())[1:4], 0.01)
    optimizer.clip_grad_norm_(0.02)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.02)
    for expected, found in zip(*held, strict=True):
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_a_factor_on_the_device_counts_as_it_was_when_it_was_used(gradients: str) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).cuda()
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = unbounded.shard(model, ours, {"optimizer": "host", "gradients": gradients})
    tokens = torch.randint(0, 300, (4, 32)).cuda()
    for one, stepped in ((reference, torch.optim.SGD(reference.parameters(), lr=0.1)), (model, optimizer)):
        factor = torch.tensor(0.5, device="cuda")
        for _ in range(2):
            one(tokens).backward()
            for parameter in one.parameters():
                parameter.grad.mul_(factor)
            factor.mul_(3)
            for parameter in one.parameters():
                parameter.grad.div_(factor)
            factor.add_(1)
            stepped.step()
            stepped.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), reference.state_dict()[name].cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer_format", ["exact", "compact"])
def test_half_precision_gives_the_same_losses_wherever_states_live(precision: str, optimizer_format: str) -> None:
    losses = []
    for plan in TIERS:
        torch.manual_seed(0)
        model = Model()
        options = {"precision": precision, "optimizer_format": optimizer_format, **plan}
        options |= {"loss_scale": 1, "loss_scale_window": 0} if precision == "fp16" else {}
        model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), options)
        losses.append(train(model, optimizer, clip=False))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-2, atol=0)


def test_states_streamed_through_the_gpu_train_as_on_the_host() -> None:
    losses = []
    for threads in (2, 64):  # few threads: most units are streamed; many: none
        torch.manual_seed(0)
        model = Model()
        plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "host_threads": threads}
        model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
        assert any(unit.streamed for unit in optimizer.engine.units) == (threads == 2)
        losses.append(train(model, optimizer, clip=True, accumulate=2))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_updates_that_begin_in_the_backward_by_themselves_end_in_the_same_bits(accumulate: int) -> None:
    found = []
    for early_units, states, has_parts in ((0, True, False), (0, True, True), (None, True, True), (None, False, True)):
        torch.manual_seed(0)
        model = Model()
        plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "host_threads": 64}  # none is streamed
        with drafting(states=states), pytest.MonkeyPatch.context() as patch:
            if not has_parts:
                patch.setattr(Drafts, "num_split", lambda _: 0)
            model, optimizer = unbounded.shard(
                model, torch.optim.AdamW(model.parameters(), lr=1e-3), {**plan, "early_units": early_units}
            )
            losses = train(model, optimizer, clip=False, accumulate=accumulate, lag=20_000_000)
        drafts = optimizer.updates.drafts
        found.append((losses, model.state_dict()))
        assert (drafts.outlook.num_taken > 0) == (early_units is None)
        assert all(draft.has_states is states for draft in drafts.of.values())
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())


def test_compiled_and_checkpointed_blocks_train_with_offloaded_weights() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).cuda()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), True)
    for block in model.blocks:
        block.compile()
    model, optimizer = unbounded.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"weights": "host", "optimizer": "host"}
    )
    torch.testing.assert_close(train(model, optimizer, True), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_gradients_that_arrive_in_parts_add_up_on_the_host(wire: torch.dtype) -> None:
    arena = HostArena(pin=True, num_threads=2)
    store = GradientArray("host", 100_003, wire=wire, sum_dtype=torch.float32)
    make: Any = lambda dtype, numel, unplanned_bytes=0: MemoryArray(arena.allocate(dtype, numel), "host")  # noqa: E731
    store.connect(make, BufferPool(arena, 16 * 4096, 1))  # several parts, and the last one not full
    torch.manual_seed(3)
    parts = [torch.randn(100_003, device="cuda").to(wire) for _ in range(4)]
    squares = store.store(parts[0], [(0, 100_003)])
    assert squares == pytest.approx(parts[0].double().square().sum().item(), rel=1e-13)
    expected = parts[0].float()
    for part in parts[1:]:
        squares = store.accumulate(part)
        expected += part.float()
        assert torch.equal(store.array.direct, expected.cpu())  # type: ignore[union-attr]
        assert squares == pytest.approx(expected.double().square().sum().item(), rel=1e-13)


def train_tower(plan: dict[str, Any], steps: int = 24) -> tuple[list[float], Any, Any]:
    """A tower of 25M parameters and batches that take little of the device; the plan before and after."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)]
    model = nn.Sequential(*blocks).to("cuda")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(model, optimizer, plan)
    first, losses = optimizer.plan, []
    for step in range(steps):
        inputs = torch.randn(64, 1024, generator=torch.Generator().manual_seed(step)).to("cuda")
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, optimizer.plan


def test_training_is_the_same_wherever_states_are_when_they_share_the_budget() -> None:
    """In a process of its own: what other tests have left on the device would count."""
    process = multiprocessing.get_context("spawn").Process(target=share_the_budget)
    process.start()
    process.join()
    assert process.exitcode == 0


def share_the_budget() -> None:
    """Half of the 512 MiB beside the context are for activations, so that the states' 384 MiB begin on both tiers."""
    balance.SLACK = math.inf  # no move is undone because steps were slow
    for loads_all_kernels in ({}, dict.fromkeys(KINDS, "host")):  # how much they take differs from machine to machine
        train_tower(loads_all_kernels, steps=2)
    count = count_device(torch.device("cuda"))
    budget = count.context_bytes() + count.coming_bytes() + 2**29
    budgeted = {"device_bytes": budget, "early_units": 0}  # states of units that have drafts stay where they are
    losses, first, plan = train_tower(budgeted)
    assert {tier for _, tier in first.optimizer} == {"device", "host"}
    assert plan.optimizer != first.optimizer
    for tiers in (dict.fromkeys(KINDS, "host"), {kind: getattr(plan, kind) for kind in KINDS}):
        others, given, kept = train_tower({**budgeted, **tiers})
        assert given.optimizer == kept.optimizer
        assert losses == others


def test_states_are_the_same_bits_wherever_they_move() -> None:
    model = Model().to(torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(model, optimizer, dict.fromkeys(KINDS, "host"))
    train(model, optimizer, clip=True)
    optimizer.wait()
    state = sharded(model)
    mover = Relocation(state.engine, state.tiers, state.bounce)
    units = mover.units_on("host")
    before = [{name: array.direct.clone() for name, array in unit.states.items()} for unit in units]
    for tier in ("device", "host"):
        for unit, states in zip(units, before, strict=True):
            mover.move(unit, tier)
            for name, values in states.items():
                array = unit.states[name]
                assert array.tier == tier
                assert torch.equal(array.direct.cpu(), values)
