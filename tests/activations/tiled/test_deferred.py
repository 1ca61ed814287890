"""Logits of Hugging Face models under `shard`: tiled where a loss takes them, made where somebody looks at them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unbounded
from unbounded.activations.tiled import heads, loss
from unbounded.activations.tiled.deferred import Deferred
from unbounded.sharding.running import sharded

PRELOAD_IN_RANKS = ["transformers"]
VOCABULARY = 97
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "capped": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
    "multiplied": ("Cohere", {"logit_scale": 0.25, "bos_token_id": 1, "eos_token_id": 2}),
    "biased": ("Phi", {"resid_pdrop": 0.0}),
}


@pytest.fixture(autouse=True)
def _small_tiles() -> None:
    use_small_tiles()


def use_small_tiles() -> None:
    loss.TILE_BYTES["cpu"] = 5 * VOCABULARY * 4  # 5 rows of 21: the last tile is not full


@pytest.fixture(autouse=True, scope="module")
def _tiles_as_they_were() -> Iterator[None]:
    before = dict(loss.TILE_BYTES)
    yield
    loss.TILE_BYTES.update(before)


def build(family: str = "plain", *, lora: bool = False) -> nn.Module:
    import transformers

    name, sizes = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    if lora:
        import peft

        targets = ["q_proj", "lm_head"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def tokens(seed: int = 0) -> Tensor:
    drawn = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(seed))
    return drawn


def labels(seed: int = 0) -> Tensor:
    return tokens(seed).masked_fill(torch.arange(7) == 3, -100)


def shard(model: nn.Module, **plan: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return unbounded.shard(model, optimizer, {"device_bytes": "64MiB", "host_bytes": "256MiB", **plan})


def train(
    model: nn.Module, optimizer: Any, *, steps: int = 2, accumulate: int = 2, rank: int = 0, **more: Any
) -> list[float]:
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            seed = 100 * rank + 10 * step + micro
            result = model(input_ids=tokens(seed), labels=labels(seed), **more).loss
            (result / accumulate).backward()
            losses.append(float(result.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_training(found: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    state, wanted = found.state_dict(), expected.state_dict()
    difference = sum(float((state[name] - value).double().norm() ** 2) for name, value in wanted.items())
    total = sum(float(value.double().norm() ** 2) for value in wanted.values())
    assert difference**0.5 <= tolerance * total**0.5


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The projections of all tiled losses."""
    found: list[str] = []
    whole = heads.sum_of_losses

    def count(projection: Any, *args: Any) -> Tensor:
        found.append(type(projection).__name__)
        return whole(projection, *args)

    monkeypatch.setattr(heads, "sum_of_losses", count)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [{}, {"weights": "host", "optimizer": "host"}], ids=["device", "host"])
def test_every_kind_of_head_trains_as_the_model_does(family: str, plan: dict[str, Any], counted: list[str]) -> None:
    model = build(family)
    expected = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours, optimizer = shard(build(family), **plan)
    assert train(ours, optimizer) == pytest.approx(expected, rel=1e-6)
    assert counted == ["LinearProjection"] * 4
    assert_same_training(ours, model)


@pytest.mark.parametrize("plan", [{}, {"weights": "host"}], ids=["device", "host"])
def test_a_head_under_lora_is_tiled_too(plan: dict[str, Any], counted: list[str]) -> None:
    model = build(lora=True)
    expected = train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    ours, optimizer = shard(build(lora=True), **plan)
    assert train(ours, optimizer) == pytest.approx(expected, rel=1e-6)
    assert counted == ["RecipeProjection"] * 4
    assert_same_training(ours, model)


@pytest.mark.parametrize("policy", ["recompute", "host", "model"])
def test_it_lives_with_recomputation(policy: str, counted: list[str]) -> None:
    model = build()
    expected = train(model, torch.optim.SGD(model.parameters(), lr=0.1), num_items_in_batch=torch.tensor(15))
    ours = build()
    if policy == "model":
        ours.gradient_checkpointing_enable({"use_reentrant": True})
        ours.enable_input_require_grads()
    ours, optimizer = shard(ours, weights="host", **({} if policy == "model" else {"activations": policy}))
    assert train(ours, optimizer, num_items_in_batch=torch.tensor(15)) == pytest.approx(expected, rel=1e-6)
    assert counted
    assert_same_training(ours, model)


def train_on_ranks(rank: int, world_size: int, family: str, stage: int) -> tuple[list[float], dict[str, Tensor], bool]:
    use_small_tiles()
    model, optimizer = shard(build(family), stage=stage)
    found = train(model, optimizer, rank=rank)
    seen = model(input_ids=tokens(), labels=labels())
    is_deferred = isinstance(seen.logits, Deferred)
    with torch.no_grad():
        seen.logits.argmax(-1)
    return found, model.state_dict(), is_deferred


@pytest.mark.parametrize(("family", "stage"), [("plain", 3), ("tied", 3), ("tied", 1)])
def test_several_ranks_average_what_each_would_have(ranks: Any, family: str, stage: int) -> None:
    results = ranks(2, train_on_ranks, family, stage)
    models = [build(family), build(family)]
    for step in range(2):
        for rank, model in enumerate(models):
            for micro in range(2):
                seed = 100 * rank + 10 * step + micro
                (model(input_ids=tokens(seed), labels=labels(seed)).loss / 2).backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = (pair[0].grad + pair[1].grad) / 2
            for parameter in pair:
                parameter.grad = mean.clone()
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    for _, state, is_deferred in results:
        assert is_deferred
        expected = models[0].state_dict()
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)


def test_logits_are_those_of_the_model_when_looked_at() -> None:
    model = build("capped")
    expected = model(input_ids=tokens(), labels=labels())
    ours, optimizer = shard(build("capped"), weights="host")
    found = ours(input_ids=tokens(), labels=labels())
    assert isinstance(found.logits, Deferred)
    assert found.logits.shape == expected.logits.shape
    assert found.logits.dtype == torch.float32
    assert found.logits.requires_grad
    with torch.no_grad():
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    assert found.logits._made is None
    assert torch.equal(found.logits[..., :-1, :].contiguous() + 0, expected.logits[..., :-1, :])
    assert torch.equal(copy.deepcopy(found.logits.detach()), expected.logits)
    assert torch.equal(found[1].float().cpu(), expected.logits)
    assert repr(found.logits) == repr(expected.logits.clone()).replace("CloneBackward0", "MulBackward0")
    # Both the loss and what was looked at reach the weights.
    (found.loss + found.logits.square().mean()).backward()
    (expected.loss + expected.logits.square().mean()).backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_training(ours, model)


def test_logits_that_nobody_looked_at_before_a_step_are_refused_after_it() -> None:
    ours, optimizer = shard(build(), weights="host")
    seen, unseen = (ours(input_ids=tokens(), labels=labels()) for _ in range(2))
    before = seen.logits.detach().clone()
    (seen.loss + unseen.loss).backward()
    optimizer.step()
    assert torch.equal(seen.logits, before)
    with pytest.raises(unbounded.StateError, match=r"weights of its head were changed.* Read output\.logits before"):
        unseen.logits.argmax(-1)


WRITES: dict[str, Any] = {
    "in place": lambda logits: logits.mul_(0.5),
    "an item": lambda logits: logits.__setitem__((..., 3), 0.0),
    "its data": lambda logits: logits.data.mul_(0.5),
    "its gradient": lambda logits: logits.retain_grad(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_what_was_derived_before_and_no_more(write: str) -> None:
    def loss_of(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        view, doubled = logits.view(-1, vocab_size), logits * 2
        WRITES[write](logits)
        losses = [nn.functional.cross_entropy(rows, labels.flatten()) for rows in (view, doubled.view(view.shape))]
        return losses[0] + 3 * losses[1]

    expected, ours = build(), shard(build())[0]
    found = []
    for model in (expected, ours):
        model.loss_function = loss_of
        result = model(input_ids=tokens(), labels=labels())
        result.loss.backward()
        gradient = result.logits.grad if write == "its gradient" else result.logits
        found.append((result.loss.detach(), gradient.detach(), model.model.norm.weight.grad.clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_gradient_of_logits_that_the_loss_went_around_is_refused() -> None:
    ours, _ = shard(build())
    result = ours(input_ids=tokens(), labels=labels())
    for ask in (
        lambda: result.logits.retain_grad(),
        lambda: result.logits.register_hook(print),
        lambda: torch.autograd.grad(result.loss, [result.logits], allow_unused=True),
    ):
        with pytest.raises(unbounded.StateError, match=r"has no gradient for them\. Leave out labels"):
            ask()
    result.loss.backward()


@pytest.mark.parametrize("with_labels", [False, True])
def test_a_loss_of_the_users_own_is_what_it_was(with_labels: bool, counted: list[str]) -> None:
    def own_loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=tokens(), **({"labels": labels()} if with_labels else {})).logits
        counted.clear()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens()[:, 1:].flatten())

    model = build()
    expected = own_loss(model)
    ours, optimizer = shard(build(), weights="host")
    found = own_loss(ours)
    assert not counted
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_training(ours, model, 1e-7)


def loss_of_bytes(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """torch takes labels in uint8, too; -100 becomes 156."""
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.flatten().to(torch.uint8), ignore_index=156)


def test_evaluation_with_labels_holds_no_logits_either(counted: list[str]) -> None:
    model = build().eval()
    ours, _ = shard(build())
    ours.eval()
    for context, loss_of in ((torch.no_grad, model.loss_function), (torch.inference_mode, loss_of_bytes)):
        ours.loss_function = model.loss_function = loss_of
        with context():
            found, expected = (each(input_ids=tokens(), labels=labels()) for each in (ours, model))
            assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
            assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
            assert not found.logits.requires_grad
    assert len(counted) == 2


def test_hooks_on_the_head_see_what_they_always_saw(counted: list[str]) -> None:
    shapes: list[Any] = []
    model = build()
    early = model.lm_head.register_forward_hook(lambda _, args, output: shapes.append(output.shape))
    ours, _ = shard(model)

    def attach_late() -> Any:
        return ours.lm_head.register_forward_hook(lambda _, args, output: shapes.append(output.shape))

    def attach_full() -> Any:
        return ours.lm_head.register_full_backward_hook(lambda _, inner, outer: shapes.append(outer[0].shape))

    def attach_pre() -> Any:
        return ours.lm_head.register_full_backward_pre_hook(lambda _, outer: shapes.append(outer[0].shape))

    def attach_to_all() -> Any:
        def see(module: nn.Module, _: Any, output: Any) -> None:
            if module is ours.lm_head:
                shapes.append(output.shape)

        return nn.modules.module.register_module_forward_hook(see)

    for attach in (lambda: early, attach_late, attach_full, attach_pre, attach_to_all):
        shapes.clear()
        handle = attach()
        ours(input_ids=tokens(), labels=labels()).loss.backward()
        assert shapes == [(3, 7, VOCABULARY)]
        handle.remove()
    assert not counted
    ours.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    changed = ours(input_ids=tokens(), labels=labels()).loss
    assert len(counted) == 1
    plain = build()
    plain.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert float(changed.detach()) == pytest.approx(
        float(plain(input_ids=tokens(), labels=labels()).loss.detach()), rel=1e-6
    )


def test_logits_that_fit_into_a_tile_are_made_at_once(counted: list[str]) -> None:
    loss.TILE_BYTES["cpu"] = 21 * VOCABULARY * 4
    ours, _ = shard(build())
    assert not isinstance(ours(input_ids=tokens(), labels=labels()).logits, Deferred)
    assert not counted


def test_a_forward_that_fails_leaves_nothing_deferred(counted: list[str]) -> None:
    ours, _ = shard(build())
    with pytest.raises(Exception, match="index out of range"):
        ours(input_ids=tokens() + VOCABULARY, labels=labels())
    assert not isinstance(ours(input_ids=tokens()).logits, Deferred)
    with pytest.raises(unbounded.PlanError, match=f"labels go from 102 to 184, but the head has {VOCABULARY} classes"):
        ours(input_ids=tokens(), labels=tokens() + VOCABULARY)
    assert not isinstance(ours(input_ids=tokens()).logits, Deferred)


def test_the_model_is_as_it_was_when_the_engine_is_taken_off() -> None:
    ours, _ = shard(build())
    sharded(ours).detach()
    assert "_compiled_call_impl" not in vars(ours.lm_head)
    assert not ours._forward_pre_hooks


def test_a_model_that_is_compiled_whole_makes_its_logits(counted: list[str]) -> None:
    torch._dynamo.reset()
    expected = build()(input_ids=tokens(), labels=labels()).loss
    ours, _ = shard(build())
    found = torch.compile(ours, backend="eager")(input_ids=tokens(), labels=labels())
    torch.testing.assert_close(found.loss, expected)
    assert torch.isfinite(found.logits).all()
