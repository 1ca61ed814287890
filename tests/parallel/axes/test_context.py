"""Context parallelism: checkpoints, padded batches, and the attention that it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unbounded
from tests.parallel import models
from tests.parallel.comparing import optimizer_of, train_parallel, without_dropout
from tests.zoo.architectures import ARCHITECTURES

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def save_and_load(rank: int, size: int, folder: str) -> Any:
    model = models.build("gpt2")
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"context": 2})
    train_parallel(model, optimizer, "gpt2", steps=2)
    unbounded.save(folder, model, optimizer)
    other = models.build("gpt2")
    other, other_optimizer = unbounded.shard(other, optimizer_of(other), {"tensor": 2, "sequence": True})
    unbounded.load(folder, other, other_optimizer)
    found, wanted = other.state_dict(), model.state_dict()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    plain = models.build("gpt2")
    plain.load_state_dict(wanted)
    tokens = models.batch("gpt2", 0)["input_ids"]
    # Also sequences that do not divide, and one with a single token for each rank.
    for one, given, cached in ((model, tokens, False), (model, tokens[:, :2], False), (other, tokens, True)):
        generated = [
            m.eval().generate(given, max_new_tokens=3, do_sample=False, use_cache=cached) for m in (plain, one)
        ]
        if not torch.equal(*generated):
            different.append(f"what {optimizer.engine.axes.sizes} generates, {cached}")
    with pytest.raises(unbounded.errors.StateError, match=r"model.generate, with use_cache=False"):
        model.generate(tokens, max_new_tokens=3)
    return different


def test_what_ranks_of_a_context_hold_is_saved_once(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, save_and_load, str(tmp_path)) == [[], []]


def refusals(rank: int, size: int, kind: str) -> str:
    changes = {"attn_implementation": "eager"} if kind == "eager" else {}
    family = kind.rpartition(" ")[2]
    model = models.build(family if family in models.FAMILIES else "gpt2", **changes)
    if kind == "swin":
        model = ARCHITECTURES["swin"].build()
    model.config.is_encoder_decoder = kind == "t5"
    batch = models.batch("gpt2", 0, length={"odd": 7, "short": 2}.get(kind, 8))
    try:
        model, _ = unbounded.shard(model, optimizer_of(model), {"context": 2})
        model(**batch)
    except unbounded.UnboundedError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("eager", "attention is 'eager'"),
        ("odd", "7 tokens"),
        ("short", "2 tokens, too few for two on a rank of context=2"),
        ("t5", "T5ForConditionalGeneration attends to another sequence"),
        ("stack of t5", "made inside a block"),
        ("swin", "the blocks of SwinForImageClassification have blocks with attention of their own"),
        ("falcon_h1", "the blocks have a Conv1d, which mixes tokens besides attention"),
    ],
)
def test_attention_that_cannot_be_cut_is_refused(ranks: Any, kind: str, wanted: str) -> None:
    for message in ranks(2, refusals, kind):
        assert wanted in message


class Mixer(nn.Module):
    """A block that looks at other tokens beside its attention, in one of several ways, and a model of two of them."""

    def __init__(self, way: str, width: int = 16) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.share, self.matrix = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width, width))
        self.table = nn.Parameter(torch.randn(256, width))
        self.register_buffer("num_runs", torch.tensor(0))

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        self.num_runs.add_(1)
        before, y = F.pad(x, (0, 0, 1, -1)), x
        if self.way == "shift":
            y = x + self.share * before
        elif self.way == "zeros":
            y = x + before @ self.matrix
        elif self.way == "mean":
            y = x - x.mean(1, keepdim=True)
        elif self.way == "positions":
            y = x + self.table[: x.shape[1]]
        elif self.way == "rows of a table":
            y = x + table[: x.shape[1]]  # type: ignore[index]
        elif self.way == "the largest":
            size = x.norm(dim=-1)
            y = x * (size >= size.quantile(0.5, 1, keepdim=True))[..., None]
        elif self.way == "chunks":
            y = x + x.unflatten(1, (-1, 128)).mean(2).repeat_interleave(128, 1)
        elif self.way == "a table of tokens":
            y = x + table
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        if self.way == "heads as rows":
            q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (x.shape[0], -1)).squeeze(1)
        return x + self.out(F.dropout(found.transpose(1, 2).flatten(2), 0.1))  # also in evaluation


class Mixers(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Mixer(way) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, (block, _) = self.words(tokens), self.blocks
        tables = {"rows of a table": block.table, "a table of tokens": block.table[None]}
        for each in self.blocks:
            x = each(x, tables[block.way].detach()) if block.way in tables else each(x)
        return x.square().mean()


RIGHT = ("chunks", "a table of tokens")
MIXING = ("shift", "zeros", "mean", "positions", "rows of a table", "the largest", "heads as rows")


def mix(rank: int, size: int, ways: tuple[str, ...], precision: str) -> dict[str, Any]:
    """What is refused, or the error of a gradient."""
    results: dict[str, Any] = {}
    for way in ways:
        torch.manual_seed(0)
        plain, tokens = Mixers(way), torch.randint(0, 11, (2, 256))
        model = copy.deepcopy(plain)
        plan = {"context": 2, "precision": precision}
        model, _ = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        torch.manual_seed(1)
        try:
            model(tokens).backward()
        except unbounded.UnboundedError as error:
            results[way] = str(error)
            continue
        torch.manual_seed(1)
        plain(tokens).backward()
        assert [int(block.num_runs) for block in model.blocks] == [1, 1]
        with unbounded.full_params(model):
            found, wanted = model.words.weight.grad, plain.words.weight.grad
            results[way] = float((found - wanted).norm() / wanted.norm())
    return results


def test_blocks_whose_own_code_mixes_tokens_are_refused(ranks: Any) -> None:
    for results in ranks(2, mix, (*RIGHT, *MIXING), "fp32"):
        assert [results[way] for way in RIGHT] == [pytest.approx(0, abs=1e-5)] * len(RIGHT)
        for way in MIXING:
            assert str(results[way]).startswith("'blocks.0' (Mixer) gives something else"), (way, results[way])
            assert "mixes tokens, or counts positions in what it is given" in results[way]
    for results in ranks(2, mix, ("nothing", "shift"), "bf16"):
        assert results.pop("nothing") < 0.05
        assert all("gives something else" in str(result) for result in results.values()), results


class MaskedBlock(nn.Module):
    """Attention in a stranger's hand, whose blocks are given a mask of 2 or 3 dims."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, by_row: bool) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if by_row:  # [rows, tokens] or [rows, tokens, tokens]; otherwise [tokens, tokens]
            mask = mask[:, None, None] if mask.dim() == 2 else mask[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 16), nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, by_row: bool) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, mask, by_row=by_row)
        return x.square().mean()


def mask_tokens(rank: int, size: int, plan: dict[str, Any]) -> list[float]:
    """The errors of gradients under masks of each kind."""
    torch.manual_seed(0)
    length = 160  # the trial takes less
    plain, tokens = Masked(), torch.randint(0, 11, (4, length))
    seen = torch.ones(4, length, dtype=torch.bool)
    seen[0, -7:] = seen[2, :90] = False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    both = seen[:, None] & causal | torch.eye(length, dtype=torch.bool)
    floats = torch.zeros(length, length).masked_fill(~causal, -1e9)
    model = copy.deepcopy(plain)
    model, optimizer = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    errors = []
    for mask, by_row in ((seen, True), (causal, False), (floats, False), (both, True)):
        plain.zero_grad()
        optimizer.zero_grad()
        plain(tokens, mask, by_row).backward()
        model(tokens, mask, by_row).backward()
        with unbounded.full_params(model):
            pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
            errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    return errors


def test_masks_for_tokens_that_blocks_are_given_work_as_on_one_rank(ranks: Any) -> None:
    styles = (("blocks.*.qkv", "column_of_3"), ("blocks.*.out", "row"))
    for size, plan in ((2, {"context": 2}), (4, {"context": 2, "tensor": 2, "styles": styles})):
        for errors in ranks(size, mask_tokens, plan):
            assert errors == [pytest.approx(0, abs=1e-5)] * 4


def pad(family: str) -> dict[str, torch.Tensor]:
    batch = models.batch(family, 0)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for row, count in enumerate((3, 0, 1)):
        batch["attention_mask"][row, 8 - count :] = 0
        batch["labels"][row, 8 - count :] = -100
    return batch


def break_off(model: nn.Module, family: str) -> None:
    """A forward ends in an exception inside a block, and then a backward does."""
    layer = [module for module in model.modules() if isinstance(module, nn.Linear)][3]
    for register in (layer.register_forward_hook, layer.weight.register_hook):
        handle = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**pad(family)).loss.backward()
        handle.remove()


def train_padded(rank: int, size: int, family: str, plan: dict[str, Any]) -> tuple[float, float, float, float]:
    plain = without_dropout(models.build(family))
    model = copy.deepcopy(plain)
    expected = plain(**pad(family)).loss
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
    break_off(model, family)
    optimizer.zero_grad()
    loss = model(**pad(family)).loss
    loss.backward()
    return float(expected), float(loss), float(norm), float(optimizer.clip_grad_norm_(1e9))


def test_padded_batches_train_as_on_one_rank_after_passes_that_broke_off(ranks: Any) -> None:
    for family, plan in (
        ("llama", {"context": 2}),
        ("bert", {"context": 2}),
        ("llama", {"tensor": 2, "sequence": True}),
    ):
        for expected, loss, norm, found in ranks(2, train_padded, family, plan):
            assert (loss, found) == pytest.approx((expected, norm), rel=1e-5)
