"""The tiled loss on a GPU: its kernels against torch's, its memory, and a sharded model's."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

import unbounded
from tests.activations.tiled.test_tiled_loss import plain, run
from unbounded.activations.tiled.entropy import Entropy, TorchKernels
from unbounded.activations.tiled.entropy_rows import EntropyRows
from unbounded.errors import PlanError
from unbounded.sharding import device_room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _alone() -> None:
    """Frees models of other tests, which the compiler's caches may hold, so that none has a promise of the device."""
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_give_what_torch_gives(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from unbounded.activations.tiled import entropy_rows as module

    torch.manual_seed(0)
    logits = (torch.randn(6, 9001, device="cuda") * 4).to(dtype)  # 9001: two blocks and a part
    labels = torch.tensor([3, -100, 9000, 0, 4096, 8191], device="cuda")
    for softcap, smoothing, z_loss, scale in itertools.product([None, 5.0], [0.0, 0.1], [0.0, 0.01], [1.0, 0.5]):
        entropy = Entropy(label_smoothing=smoothing, z_loss=z_loss, softcap=softcap, scale=scale)
        ours = EntropyRows(logits, labels, entropy)
        found = ours.losses(), ours.write_gradient(logits.clone())
        with monkeypatch.context() as patch:
            patch.setattr(module, "_kernels", lambda _: TorchKernels)
            theirs = EntropyRows(logits, labels, entropy)
            expected = theirs.losses(), theirs.write_gradient(logits.clone())
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(found[1], expected[1], rtol=max(2 * step, 1e-4), atol=1e-6)


def inputs(rows: int, classes: int, width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, width, device="cuda") * 0.05).bfloat16().requires_grad_()
    return {"hidden": hidden, "weight": weight, "labels": torch.randint(classes, (rows,), device="cuda")}


def test_it_equals_the_plain_loss_and_holds_a_tile() -> None:
    given = inputs(8192, 50_257, 512)
    expected = run(plain, given | {"bias": None})
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(unbounded.tiled_cross_entropy, given, tile_bytes="64MiB")
    peak = torch.cuda.max_memory_allocated() - before
    gradients = given["hidden"].nbytes + given["weight"].nbytes
    assert peak < 64 * 2**20 + 3 * gradients + 2 * given["weight"].nbytes  # fp32 sums of 13 tiles; all logits: 785 MiB
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def test_labels_outside_the_vocabulary_are_an_error_that_leaves_the_device_usable() -> None:
    given = inputs(64, 1000, 32)
    with pytest.raises(PlanError, match="the labels go from 1000 to 1000, but the head has 1000 classes"):
        unbounded.tiled_cross_entropy(**given | {"labels": torch.full((64,), 1000, device="cuda")})
    assert torch.isfinite(unbounded.tiled_cross_entropy(**given))


# -- the budget ------------------------------------------------------------------------------------------------------


def llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config, vocab_size=64000, use_cache=False, **sizes)).to(torch.bfloat16)


def taken_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_the_driver_counts_no_more_than_the_budget_and_a_batch_too_large_is_an_error_that_training_survives() -> None:
    torch.cuda.empty_cache()
    foreign = taken_bytes() - torch.cuda.memory_reserved()  # the context of this process included
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(model, optimizer, {"device_bytes": "4GiB", "activations": "keep"})
    promise = device_room._promises[model]
    tokens = torch.randint(64000, (1, 1024), device="cuda")

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() + promise.driver.context_bytes() <= 4 * 2**30
        assert taken_bytes() - foreign <= 4 * 2**30
        return float(loss.detach())

    losses = [step(tokens) for _ in range(3)]
    with pytest.raises(PlanError, match="the labels go from 64000 to 64000, but the head has 64000 classes"):
        model(input_ids=tokens, labels=torch.full_like(tokens, 64000))
    with pytest.raises(
        unbounded.BudgetError, match=r"The batch \(input_ids \[64, 1024\], labels .* does not fit into devi"
    ):
        step(tokens.repeat(64, 1))
    optimizer.zero_grad()
    assert step(tokens) < losses[-1]


def test_a_shortage_in_the_backward_is_explained_too() -> None:
    model = llama(attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(model, optimizer, {"device_bytes": "4GiB", "activations": "recompute"})
    tokens = torch.randint(64000, (2, 512), device="cuda")
    held = []
    loss = model(input_ids=tokens, labels=tokens).loss
    cap = device_room._promises[model].cap_bytes
    torch.cuda.empty_cache()
    held.append(torch.empty(cap - torch.cuda.memory_reserved() - 8 * 2**20, dtype=torch.uint8, device="cuda"))
    with pytest.raises(unbounded.BudgetError, match="does not fit into device_bytes"):
        loss.backward()
    held.clear()
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


# -- layers ------------------------------------------------------------------------------------------------------------


def test_tiled_layers_train_on_a_gpu_with_a_few_tiles_there_at_a_time() -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048)]
        return torch.nn.Sequential(torch.nn.Embedding(4096, 2048), *layers)

    plain = build().cuda()
    batch = torch.randint(4096, (4, 16), device="cuda")
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = build()
    assert unbounded.tile(model, "8MiB") == {"0.weight": 4, "1.weight": 8, "3.weight": 8}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = unbounded.shard(model, optimizer, {"weights": "host", "gradients": "host", "optimizer": "host"})
    for _ in range(2):
        for each, steps in ((model, optimizer), (plain, sgd)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            each(batch).square().mean().backward()
            steps.step()
            steps.zero_grad()
            torch.cuda.synchronize()
            if each is model:  # all of its weights are twenty tiles
                assert torch.cuda.max_memory_allocated() - before < 12 * 8 * 2**20
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value.cpu(), rtol=1e-4, atol=1e-5)
