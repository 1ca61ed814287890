"""What cannot work is the same clear error on every rank, before any of them waits for another."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import unbounded
from tests.parallel import models
from tests.parallel.comparing import optimizer_of
from unbounded.errors import PeerError

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Sharing(Flat):
    """What it does between its layers looks at all features, and no module is around the two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Flat() for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Heads(nn.Module):
    """Attention whose code fixes the number of heads, so that parts of it would have narrower ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.feed = Heads(), Flat()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.heads(x) + self.feed(x)


class MixingLayer(Layer):
    """Its own code mixes tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.cumsum(1)


class Tower(nn.Module):
    """Blocks that code of the model's own uses in an unusual way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words = way, nn.Embedding(models.VOCABULARY, 8)
        self.blocks = nn.ModuleList((MixingLayer if way == "mixing" else Layer)() for _ in range(4))
        self.before = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        if self.way == "early":
            x = self.before(x)
        total = torch.zeros(())
        for block in [*self.blocks, *(self.blocks if self.way == "twice" else [])]:
            y = block(x)
            total, x = total + y, x + y if self.way == "outside" else y
        x = total if self.way == "total" else x
        logits = x @ self.words.weight.t() if self.way == "tied" else x
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(0, 7))


def make_model(family: str, changes: dict[str, Any]) -> Any:
    if family == "tower":
        return Tower(**changes)
    own = {"flat": Flat, "sharing": Sharing, "classes": Classes}
    return own[family]() if family in own else models.build(family, **changes)


def refusal(rank: int, size: int, family: str, plan: dict[str, Any], changes: dict[str, Any], call: bool) -> str:
    kind, _, family = family.rpartition(" ")
    model = make_model(family, changes)
    if kind == "tiled":
        unbounded.tile(model, 1536)
    optimizer = torch.optim.Adafactor(model.parameters()) if kind == "adafactor" else optimizer_of(model)
    plan = {key: value[rank] if isinstance(value, dict) and rank in value else value for key, value in plan.items()}
    try:
        model, _ = unbounded.shard(model, optimizer, plan)
        if kind == "divided":
            run = unbounded.pipeline(model) if "pipeline" in plan else model
            run(**models.batch("gpt2", 0, rank))
        elif call and "pipeline" in plan:
            unbounded.pipeline(model)(**models.batch("gpt2", 0))
        elif call and isinstance(model, Flat):
            model(torch.ones(2, 8))
        elif kind in ("input_ids", "labels"):
            batch = models.batch("gpt2", 0)
            batch[kind][1, 2] = models.VOCABULARY
            model(**batch)
        elif call:
            model(**models.batch("gpt2", 0, length=8 if family == "tower" else 7))
    except unbounded.UnboundedError as error:
        return str(error)
    return "nothing was refused"


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool, str]] = {
    "mesh": ("gpt2", {"tensor": 3}, {}, False, "tensor=3 needs 3 ranks"),
    "heads": (
        "gpt2",
        {"tensor": 2},
        {"n_head": 1},
        False,
        "the 1 heads of 'transformer.h.0.attn.c_attn'",
    ),
    "query heads": (
        "llama",
        {"tensor": 2},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12},
        False,
        "the 3 heads of 'model.layers.0.self_attn.q_proj' do not divide over tensor=2",
    ),
    "features": ("llama", {"tensor": 2}, {"intermediate_size": 25}, False, "the 25 features of"),
    "no plan": ("flat", {"tensor": 2}, {}, False, "Flat has no tensor-parallel plan"),
    "no such layer": (
        "flat",
        {"tensor": 2, "styles": (("uq", "column"),)},
        {},
        False,
        "no layer of Flat matches the tensor styles",
    ),
    "features between": (
        "sharing",
        {"tensor": 2, "styles": (("up", "column"), ("down", "row"))},
        {},
        True,
        "Sharing gives something else (a relative difference of",
    ),
    "no end": (
        "classes",
        {"tensor": 2, "styles": (("blocks.*.up", "column"), ("blocks.*.down", "row"), ("head", "column"))},
        {},
        False,
        "'head' has the style 'column', but no row layer comes after it",
    ),
    "other tokens": (
        "input_ids gpt2",
        {"tensor": 2},
        {},
        True,
        "some tokens are 35, but the vocabulary has 35 entries. Give tokens between 0 and 34.",
    ),
    "other labels": (
        "labels gpt2",
        {"tensor": 2},
        {},
        True,
        "some labels are 35, but the vocabulary has 35 entries. Give labels between 0 and 34, or -100 for those",
    ),
    "style": ("flat", {"tensor": 2, "styles": (("up", "colum"),)}, {}, False, "Did you mean 'column'?"),
    "sequence alone": ("gpt2", {"sequence": True}, {}, False, "sequence without a tensor axis"),
    "tiles and tensor": ("tiled llama", {"tensor": 2}, {}, False, "layers of the model are tiled"),
    "tiles and pipeline": ("tiled llama", {"pipeline": 2}, {}, False, "layers of the model are tiled"),
    "tiles and context": ("tiled llama", {"context": 2}, {}, False, "Leave out unbounded.tile"),
    "whole tensors": ("adafactor llama", {"tensor": 2}, {}, False, "but the plan cuts it over the tensor axis"),
    "odd sequence": ("gpt2", {"tensor": 2, "sequence": True}, {}, True, "7 tokens, which do not divide over tensor=2"),
    "cannot be cut": ("flat", {"pipeline": 2}, {}, False, "Flat has no list of repeated blocks"),
    "too few blocks": ("gpt2", {"pipeline": 2}, {"n_layer": 1}, False, "1 blocks (in 'transformer.h'), too few for 2"),
    "too few": ("gpt2", {"pipeline": 2, "microbatches": 1}, {}, False, "microbatches=1 are too few"),
    "odd number": (
        "gpt2",
        {"pipeline": 2, "microbatches": 3, "schedule": "interleaved"},
        {},
        False,
        "do not divide by",
    ),
    "rows": ("gpt2", {"pipeline": 2, "microbatches": 3}, {}, True, "4 rows, which do not divide into microbatches=3"),
    "schedule": ("gpt2", {"pipeline": 2, "schedule": "1fib"}, {}, False, "Did you mean '1f1b'?"),
    "halves": (
        "gpt2",
        {"pipeline": 2, "schedule": "zero_bubble", "activations": "recompute"},
        {},
        False,
        "zero_bubble' splits backwards",
    ),
    "routing over stages": (
        "mixtral",
        {"pipeline": 2},
        {"output_router_logits": True},
        True,
        "output_router_logits=True asks for a value of every block, but a rank has only some of it with pipeline=2",
    ),
    "routing of parts": (
        "mixtral",
        {"context": 2},
        {"output_router_logits": True},
        True,
        "output_router_logits=True asks for a value of every block, but a rank has only some of it with context=2",
    ),
    "hidden states of parts": (
        "llama",
        {"tensor": 2, "sequence": True},
        {"output_hidden_states": True},
        True,
        "output_hidden_states=True asks for a value of every block, but a rank has only some of it with sequence=True",
    ),
    "attentions of some heads": (
        "llama",
        {"tensor": 2},
        {"attn_implementation": "eager", "output_attentions": True},
        True,
        "output_attentions=True asks for a value of every block, but a rank has only some of it with tensor=2",
    ),
    "a tie in the code": ("tower", {"pipeline": 2}, {"way": "tied"}, True, "not have is NaN: 'words.weight', the"),
    "a layer that runs earlier": ("tower", {"pipeline": 2}, {"way": "early"}, True, "'before.weight', 'before.bias'"),
    "a sum outside": ("tower", {"pipeline": 2}, {"way": "outside"}, True, "Tower gives NaN in the first forward of"),
    "a sum of outputs": ("tower", {"pipeline": 2}, {"way": "total"}, True, "the outputs of all earlier blocks but"),
    "blocks twice": ("tower", {"pipeline": 2}, {"way": "twice"}, True, "block 0 of another pipeline stage was called"),
    "fixed heads": (
        "tower",
        {"tensor": 2, "styles": (("blocks.*.heads.qkv", "column_of_3"), ("blocks.*.heads.out", "row"))},
        {"way": "plain"},
        True,
        "'blocks.0.heads' (Heads) gives something else (a relative difference of",
    ),
    "a part of a sum": (
        "tower",
        {"tensor": 2, "sequence": True, "styles": (("blocks.*.feed.up", "column"), ("blocks.*.feed.down", "row"))},
        {"way": "mixing"},
        True,
        "With sequence=True a block sees a part of the sequence: put code that mixes tokens into",
    ),
    "other rows, tensor": ("divided gpt2", {"tensor": 2}, {}, True, "ranks of the tensor axis were given different"),
    "other rows, context": ("divided gpt2", {"context": 2}, {}, True, "ranks of the context axis were given different"),
    "other rows, pipeline": ("divided gpt2", {"pipeline": 2}, {}, True, "ranks of the pipeline axis were given"),
    "ranks disagree": ("gpt2", {"tensor": {0: 2, 1: 1}}, {}, False, "rank 1 has a different plan from rank 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_refuses_alike(ranks: Any, case: str) -> None:
    family, plan, changes, call, wanted = CASES[case]
    for message in ranks(2, refusal, family, plan, changes, call):
        assert wanted in message


LATER = {
    "rows": "a batch of input_ids (2, 8), labels (2, 8) instead of a batch of input_ids (4, 8), labels (4, 8)",
    "autocast": "labels (4, 8), under autocast to torch.bfloat16 instead of a batch of input_ids (4, 8), labels (4, 8)",
    "no labels": "a batch of input_ids (4, 8) instead of a batch of input_ids (4, 8), labels (4, 8)",
    "step": "rank 0 is in optimizer.step(); rank 1 is in a forward with gradients",
    "eval": "rank 0 is in a forward with gradients; rank 1 is in a forward without gradients",
    "frozen": "frozen since shard: transformer.wpe.weight instead of frozen since shard: nothing",
}


def differ_later(rank: int, size: int, plan: dict[str, Any], kind: str) -> str:
    """What a rank raises in the second step, in which the last rank does something else."""
    model = models.build("gpt2", n_layer=2)
    model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
    model(**models.batch("gpt2", 0)).loss.backward()
    batch, is_other = models.batch("gpt2", 1), rank == size - 1
    if kind == "step":
        with pytest.raises(PeerError) as caught:
            model(**batch) if is_other else optimizer.step()
        return str(caught.value)
    optimizer.step()
    optimizer.zero_grad()
    if is_other and kind == "rows":
        batch = {name: value[:2] for name, value in batch.items()}
    if is_other and kind == "no labels":
        del batch["labels"]
    if is_other and kind == "frozen":
        model.transformer.wpe.weight.requires_grad_(False)
    is_cast = is_other and kind == "autocast"
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_cast),
        torch.set_grad_enabled(not (is_other and kind == "eval")),
        pytest.raises(PeerError) as caught,
    ):
        model(**batch)
    return str(caught.value)


@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.parametrize("kind", LATER)
def test_ranks_of_one_copy_that_go_apart_say_so(ranks: Any, axis: str, kind: str) -> None:
    for message in ranks(2, differ_later, {axis: 2}, kind):
        assert LATER[kind] in message


APART = {
    "mode": "model.eval() instead of model.train()",
    "seed": "instead of the random state",
    "kept": "gradients of an earlier backward instead of no gradients",
    "rate": "rank 1 has different settings in optimizer.step() from rank 0: lr=0.02 instead of lr=0.002",
    "norm": "rank 0 is in optimizer.clip_grad_norm_(1.0); rank 1 is in optimizer.clip_grad_norm_(2.0)",
    "cleared": "rank 1 has different settings in optimizer.step() from rank 0: gradients of 0 parameters instead of",
    "loads": "rank 1 is in model.load_state_dict()",
    "shows": "rank 1 is in unbounded.full_params()",
    "saves": "rank 1 is in unbounded.save()",
    "resumes": "rank 1 is in unbounded.load()",
    "exports": "rank 1 is in unbounded.export()",
    "only clips": "rank 0 is in optimizer.step(); rank 1 is in optimizer.clip_grad_norm_(2.0)",
}
OVER_STAGES = {
    "mode": "labels (1, 8), in model.eval(). Give",
    "kept": "before this batch only ranks [1] of the pipeline axis have gradients of an earlier one",
}


def go_apart(rank: int, size: int, plan: dict[str, Any]) -> dict[str, str]:
    """What a rank raises in the second step, in which rank 1 does something else."""
    found = {}
    for kind in APART:
        model = models.build("gpt2", n_layer=plan.get("pipeline", 1))
        values = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        run = unbounded.pipeline(model) if "pipeline" in plan else lambda m=model, **batch: m(**batch).loss.backward()
        run(**models.batch("gpt2", 0))
        optimizer.step()
        is_other = rank == 1
        if not (is_other and kind == "kept"):
            optimizer.zero_grad()
        if is_other and kind == "mode":
            model.eval()
        if is_other and kind == "seed":
            torch.manual_seed(1)
        if is_other and kind == "rate":
            optimizer.param_groups[0]["lr"] *= 10
        try:
            if is_other and kind == "loads":
                model.load_state_dict(values)
            if is_other and kind == "shows":
                with unbounded.full_params(model):
                    pass
            if is_other and kind == "saves":
                unbounded.save("never", model, optimizer)
            if is_other and kind == "resumes":
                unbounded.load("never", model, optimizer)
            if is_other and kind == "exports":
                unbounded.export("never", model)
            run(**models.batch("gpt2", 1))
            if is_other and kind == "cleared":
                optimizer.zero_grad()
            if kind == "norm" or (kind == "only clips" and is_other):
                optimizer.clip_grad_norm_(1.0 + is_other)
            optimizer.step()
        except unbounded.UnboundedError as error:
            found[kind] = str(error)
    return found


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_ranks_of_one_copy_that_train_it_differently_say_so(ranks: Any, axis: str) -> None:
    own = ("seed", "cleared") if axis == "pipeline" else ()  # stages have their own random numbers and gradients
    wanted = {key: OVER_STAGES.get(key, text) if own else text for key, text in APART.items() if key not in own}
    for found in ranks(2, go_apart, {axis: 2}):
        assert found.keys() == wanted.keys()
        for kind, text in wanted.items():
            assert text in found[kind], kind


def catch(rank: int, size: int, plan: dict[str, Any]) -> str:
    """What a rank raises when rank 1 has caught an exception of a forward, and goes on with the step."""
    model = models.build("gpt2", n_layer=2)
    model, optimizer = unbounded.shard(model, optimizer_of(model), plan | {"watchdog_seconds": 1})
    model(**models.batch("gpt2", 0)).loss.backward()
    optimizer.step()
    if rank == 1:
        model.transformer.h[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        with contextlib.suppress(ZeroDivisionError):
            model(**models.batch("gpt2", 1)).loss.backward()
        optimizer.step()
    except PeerError as error:
        return str(error)
    return ""


def test_a_rank_that_catches_an_exception_ends_the_others(ranks: Any) -> None:
    for message in ranks(2, catch, {"tensor": 2}):
        assert re.search(r"in the sum of layer 'transformer\.h\.\d\.attn.c_proj'", message), message


def copy_model(rank: int, size: int, plans: list[dict[str, Any]]) -> list[str]:
    refusals = []
    for plan in plans:
        model = models.build("gpt2", n_layer=2)
        model, _ = unbounded.shard(model, optimizer_of(model), plan)
        for make in (copy.deepcopy, AveragedModel):
            with pytest.raises(unbounded.errors.StateError) as caught:
                make(model)
            refusals.append(str(caught.value))
    return refusals


def test_a_model_over_axes_is_not_copied(ranks: Any) -> None:
    for refusals in ranks(2, copy_model, [{"tensor": 2}, {"context": 2}, {"pipeline": 2}]):
        assert len(refusals) == 6
        assert all("so it cannot be copied" in refusal for refusal in refusals)
