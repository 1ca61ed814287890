"""Policies on a GPU: equal results, less device memory, and copies that run in their lanes during the computation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from tests.activations.models import ALL, Stack, losses_of, make, tokens
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.offload.shelf import LEAVING_AT_ONCE
from unbounded.errors import StateError
from unbounded.observe import trace
from unbounded.planner.sizes import parse_bytes
from unbounded.sharding.device_room import _shelves

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, DEPTH, ROWS, LENGTH = 1024, 12, 8, 1024
INPUT = ROWS * LENGTH * WIDTH * 2  # 16 MiB in bf16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1)).masked_fill(mask, 0)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, batch: Tensor) -> Tensor:
        x, mask = self.embedding(batch), (batch % 7 == 0).unsqueeze(-1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.float().square().mean()


def beside_context(num_bytes: int) -> int:
    """A budget that leaves `num_bytes` for tensors: the context of the process counts too, and pieces of segments."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + num_bytes + num_bytes // 8


def build() -> Tower:
    torch.manual_seed(1)
    return Tower().to("cuda", torch.bfloat16)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)).cuda()


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Losses bit by bit; gradients closely, since some of a GPU's kernels add in any order."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        torch.testing.assert_close(one[1:], other[1:], rtol=1e-4 if one[1].dtype == torch.float32 else 2e-2, atol=1e-5)


def peak_between(model: nn.Module) -> int:
    """Device bytes that are allocated between a forward and its backward, without the model's own."""
    inputs = batch()
    model(inputs).backward()  # buffers are made, gradients are there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(inputs)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:blocks that run inside the caller's own checkpoint")
def test_the_host_gives_what_recomputing_gives(kind: type[Stack]) -> None:
    found = []
    for policy in ("recompute", "host"):
        model = make(kind).cuda()
        unbounded.checkpoint_activations(model, policy)
        found.append([gradients(model, tokens(step).cuda()) for step in range(3)])
    assert_equal(*found)


def test_a_deep_model_gives_the_same_in_every_step() -> None:
    found = []
    for policy in ("recompute", "host"):
        model = build()
        unbounded.checkpoint_activations(model, policy)
        found.append([gradients(model, batch(step)) for step in range(4)])
    assert_equal(*found)


def test_the_device_holds_the_inputs_of_the_last_blocks_alone() -> None:
    held = {}
    for policy in ("recompute", "host"):
        model = build()
        unbounded.checkpoint_activations(model, policy)
        held[policy] = peak_between(model)
        del model
    mask = ROWS * LENGTH
    assert held["recompute"] >= DEPTH * INPUT
    assert held["recompute"] - held["host"] >= (DEPTH - LEAVING_AT_ONCE) * INPUT - 2 * mask


def test_the_peak_of_a_step_is_lower_by_the_inputs_that_left() -> None:
    peaks = {}
    for policy in ("recompute", "host"):
        gc.collect()  # models of other tests
        before = torch.cuda.memory_allocated()
        model = build()
        unbounded.checkpoint_activations(model, policy)
        model(batch()).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(batch()).backward()
        peaks[policy] = torch.cuda.max_memory_allocated() - before
        del model
    # One input is fetched ahead, and those of the last blocks have not left when the backward begins.
    assert peaks["recompute"] - peaks["host"] >= (DEPTH - LEAVING_AT_ONCE - 2) * INPUT


def test_buffers_are_pinned_and_a_steady_step_allocates_none() -> None:
    model = build()
    unbounded.checkpoint_activations(model, "host")
    used = []
    for step in range(4):
        model(batch(step)).backward()
        used.append(_shelves[model].buffers.room.arena.used_bytes)
    assert used == [used[0]] * 4
    assert used[0] == DEPTH * INPUT + 2 * 4096  # and the mask, with one byte per token
    assert all(chunk.raw.is_pinned() for chunk in _shelves[model].buffers._chunks)


def test_copies_are_counted_in_their_lanes_and_a_shared_mask_goes_once() -> None:
    model = build()
    unbounded.checkpoint_activations(model, "host")
    before = trace.lane_totals()
    model(batch()).backward()
    torch.cuda.synchronize()
    after = trace.lane_totals()
    out, back = (after[lane].bytes - before[lane].bytes for lane in ("device-to-host", "host-to-device"))
    assert out == DEPTH * INPUT + ROWS * LENGTH
    assert (DEPTH - LEAVING_AT_ONCE) * INPUT <= back <= out  # the last ones were still there


def test_a_step_waits_for_no_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    unbounded.checkpoint_activations(model, "host")
    model(batch()).backward()
    torch.cuda.synchronize()

    def refuse(*_: Any) -> None:
        raise AssertionError("the host waited for the device")

    for kind, name in ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")):
        monkeypatch.setattr(kind, name, refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    model(batch()).backward()


def test_an_input_changed_while_it_leaves_is_an_error() -> None:
    class Careless(Tower):
        def forward(self, inputs: Tensor) -> Tensor:
            x, mask = self.embedding(inputs), (inputs % 7 == 0).unsqueeze(-1)
            for block in self.blocks:
                before = x * 1.0
                x = block(before, mask=mask)
                before.mul_(2.0)
            return x.float().square().mean()

    torch.manual_seed(1)
    model = Careless().to("cuda", torch.bfloat16)
    unbounded.checkpoint_activations(model, "host")
    with pytest.raises(StateError, match="was changed in place"):
        model(batch()).backward()


def test_a_sharded_model_counts_its_activations_on_the_host() -> None:
    losses = {}
    for policy in ("recompute", "host"):
        torch.manual_seed(1)
        model = Tower()
        plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "activations": policy}
        model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
        torch.manual_seed(2)
        losses[policy] = losses_of(model, optimizer, map(batch, range(4)))
        expected = DEPTH * INPUT + 2 * 4096 if policy == "host" else 0
        assert optimizer.memory()["host"].activation_bytes == expected
    assert losses["host"] == pytest.approx(losses["recompute"], rel=1e-3)


def test_auto_keeps_what_the_budget_has_room_for_and_never_more() -> None:
    """A block keeps about 240 MiB, so 12 of them 3 GiB; the device has nothing else to hold."""
    losses, kept = {}, {}
    for budget in ("1GiB", "2.5GiB", "16GiB"):
        gc.collect()  # models of other tests
        assert torch.cuda.memory_allocated() < 2**27
        torch.manual_seed(1)
        model = Tower()
        plan = {
            "precision": "bf16",
            "weights": "host",
            "optimizer": "host",
            "device_bytes": beside_context(parse_bytes(budget, "budget")),
        }
        model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(2)
        losses[budget] = losses_of(model, optimizer, map(batch, range(5)))
        assert torch.cuda.max_memory_allocated() <= parse_bytes(budget, "budget")
        (headroom,) = {block.headroom for block in attached_to(model)}
        assert headroom is not None
        kept[budget] = headroom.num_kept
        del model, optimizer
    assert kept["1GiB"] < kept["2.5GiB"] < kept["16GiB"] == DEPTH
    assert kept["2.5GiB"] >= DEPTH // 3
    assert losses["1GiB"] == pytest.approx(losses["16GiB"], rel=1e-3)
    assert losses["2.5GiB"] == pytest.approx(losses["16GiB"], rel=1e-3)


def test_auto_gives_back_the_host_memory_of_a_first_larger_batch() -> None:
    gc.collect()  # models of other tests
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    model = Tower()
    plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "device_bytes": beside_context(3 << 29)}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    used = []
    for rows in (1, 1, 1, 8, 8, 8):
        model(batch()[:rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        used.append(optimizer.memory()["host"].activation_bytes)
    assert used[:3] == [0, 0, 0]
    assert used[3] >= DEPTH * INPUT / 2  # eight times the tail, squared, is more than there is
    assert max(used[4:]) < used[3] / 3  # weights being fetched may leave no room for a block or two
    optimizer.wait()  # until its last update ends, the model lives and its budget holds


def test_auto_is_not_misled_by_a_peak_that_was_there_before_training() -> None:
    gc.collect()  # models of other tests
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    torch.manual_seed(1)
    model = Tower()
    plan = {"precision": "bf16", "weights": "host", "optimizer": "host", "device_bytes": beside_context(3 << 29)}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    assert torch.cuda.max_memory_allocated() >= 4 << 30
    for step in range(5):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # All inputs would go to the host if the peak counted. Weights being fetched may leave no room for a few.
    assert optimizer.memory()["host"].activation_bytes < DEPTH * INPUT / 2


def test_auto_decides_for_blocks_that_are_compiled_without_compiling_again() -> None:
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    model = build()
    for block in model.blocks:
        block.compile(backend=backend)
    plan = {"weights": "host", "optimizer": "host", "device_bytes": beside_context(5 << 29)}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    for step in range(4):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            first = len(compiled)
    assert len(compiled) == first


def test_compiled_blocks_have_their_inputs_on_the_host() -> None:
    found = []
    for policy in ("recompute", "host"):
        torch._dynamo.reset()
        model = build()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        unbounded.checkpoint_activations(model, policy)
        found.append([gradients(model, batch())])
    assert_equal(*found)
