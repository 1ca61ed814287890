"""Tensor parallelism: what it exchanges, what a rank holds, and the loss over a cut vocabulary."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unbounded
from tests.parallel import models
from tests.parallel.comparing import check, compare, optimizer_of, without_dropout, worst_error

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts the collectives of the tensor axis inside."""
    from unbounded.ranks import axis

    names = {"all_reduce": dist, "_gather": axis, "all_to_all_single": dist}  # a scattered sum is an exchange on a CPU
    plain = {name: getattr(home, name) for name, home in names.items()}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain[name](*args, **kwargs)

        return call

    for name, home in names.items():
        setattr(home, name, wrap(name))
    try:
        yield
    finally:
        for name, home in names.items():
            setattr(home, name, plain[name])


def count_collectives(rank: int, size: int, family: str, sequence: bool) -> list[Any]:
    found = []
    for depth in (1, 3):
        model = models.build(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": depth})
        model, _ = unbounded.shard(model, optimizer_of(model), {"tensor": 2, "sequence": sequence})
        model(**models.batch(family, 0))  # in the first forward of all, ranks also make the lane of their comparisons
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        with counted(forward):
            loss = model(**models.batch(family, 0)).loss
        with counted(backward):
            loss.backward()
        found.append((forward, backward))
    (low_f, low_b), (high_f, high_b) = found
    return [{name: (high[name] - low[name]) / 2 for name in high} for low, high in ((low_f, high_f), (low_b, high_b))]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_block_has_two_all_reduces_forward_and_two_backward(ranks: Any, family: str) -> None:
    for forward, backward in ranks(2, count_collectives, family, False):
        assert {name: count for name, count in forward.items() if count} == {"all_reduce": 2}
        assert {name: count for name, count in backward.items() if count} == {"all_reduce": 2}


def test_with_sequence_parallelism_each_is_split_in_two(ranks: Any) -> None:
    for forward, backward in ranks(2, count_collectives, "llama", True):
        assert forward == {"_gather": 2, "all_to_all_single": 2, "all_reduce": 0}
        assert backward == {"_gather": 2, "all_to_all_single": 2, "all_reduce": 1}  # 1: the block's norms


def held(rank: int, size: int, plan: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a rank's states after a step, and of what goes from block to block for a token."""
    model = models.build("llama", vocab_size=36, attention_bias=False, attention_dropout=0.0)
    model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
    seen: list[int] = []
    block = model.model.layers[2]
    block.mlp.register_forward_hook(lambda module, args, output: seen.append(output.numel()))
    batch = models.batch("llama", 0)
    plain = models.build("llama", vocab_size=36, attention_bias=False, attention_dropout=0.0)(**batch).logits
    output = model(**batch)
    assert output.logits.shape == plain.shape
    torch.testing.assert_close(output.logits, plain)  # parts in this forward, until somebody looks
    optimizer.scale(output.loss + output.logits.square().mean()).backward()
    optimizer.step()
    optimizer.wait()
    optimizer.zero_grad()
    return optimizer.memory()["device"].used_bytes, seen[0] // batch["input_ids"].shape[0]


def test_a_rank_holds_what_the_formula_says(ranks: Any) -> None:
    width, inner, vocabulary, blocks, length = 16, 24, 36, 4, 8
    cut = 2 * vocabulary * width + blocks * (2 * width * width + 2 * width * width // 2 + 3 * width * inner)
    norms = (2 * blocks + 1) * width
    for plan, parts, rows in (({"tensor": 1}, 1, 1), ({"tensor": 2}, 2, 1), ({"tensor": 2, "sequence": True}, 2, 2)):
        shared = 2 // parts  # ranks of the data axis, which the states are partitioned over
        for used, boundary in ranks(2, held, plan):
            # weights and two moments in fp32; units are rounded up by 256 elements per rank at most
            elements = (cut // parts + norms) / shared
            assert elements * 12 <= used <= (elements + (blocks + 3) * 256 * 2) * 12
            assert boundary == length * width // rows


def compare_in_tiles(rank: int, size: int, family: str, plans: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """`compare` with a loss in tiles of three rows."""
    from unbounded.activations.tiled import loss
    from unbounded.planner.step import logits

    saved, tiles = (logits.TILE_BYTES, logits.LEAST_TILE_BYTES, loss.EntropyRows), []

    def count(*args: Any) -> Any:
        tiles.append(args[0].shape)
        return saved[2](*args)

    try:
        logits.LEAST_TILE_BYTES = 3 * 18 * 4  # 18: the larger part of the vocabulary over two ranks
        logits.TILE_BYTES, loss.EntropyRows = {"cpu": logits.LEAST_TILE_BYTES}, count  # type: ignore[misc, assignment]
        results = compare(rank, size, family, plans, {}, 2)
    finally:
        logits.TILE_BYTES, logits.LEAST_TILE_BYTES, loss.EntropyRows = saved  # type: ignore[misc]
    return results, len(tiles)


def test_the_loss_of_a_cut_vocabulary_goes_over_tiles(ranks: Any) -> None:
    found = ranks(2, compare_in_tiles, "llama", [{"tensor": 2}, {"tensor": 2, "sequence": True}])
    check([results for results, _ in found])
    assert all(num_tiles == 2 * 2 * -(-4 * 8 // 3) for _, num_tiles in found)  # plans, steps, rows


def least_likely(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return logits.float().log_softmax(-1).amin(-1).mean()


def change_the_loss(rank: int, size: int) -> tuple[float, float, float]:
    model = without_dropout(models.build("llama", num_hidden_layers=1))
    plain = copy.deepcopy(model)
    model, optimizer = unbounded.shard(model, optimizer_of(model), {"tensor": 2})
    batch = models.batch("llama", 0)
    model(**batch | {"labels": torch.full_like(batch["labels"], -100)}).loss.backward()
    norm = float(optimizer.clip_grad_norm_(1.0))
    optimizer.zero_grad()
    for one in (model, plain):
        one.loss_function = least_likely
    return float(model(**batch).loss), float(plain(**batch).loss), norm


def test_another_loss_that_a_model_is_given_later_sees_all_classes_and_none_gives_no_gradient(ranks: Any) -> None:
    for found, wanted, norm_without_labels in ranks(2, change_the_loss):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert norm_without_labels == 0.0


def change_gradients(model: nn.Module, *, holds: bool = False) -> list[float]:
    """What a script may do to whole gradients; returns what it saw. If it `holds` them, one rank has them longer."""
    seen = []
    for name, parameter in model.named_parameters():
        largest = parameter.grad.abs().max()
        held = parameter.grad.data if holds else None
        seen += [float(largest), float(parameter.grad.norm()), float(parameter.grad.sum())]
        del held
        if "up_proj" in name:
            parameter.grad = parameter.grad + parameter.detach() * 0.01
        elif "q_proj.weight" in name:
            parameter.grad[0].mul_(3.0)
        elif "v_proj" in name:
            parameter.grad.zero_()
            parameter.grad.add_(parameter.detach())
        elif "embed" in name:
            parameter.grad = None
        else:
            parameter.grad.div_(largest)
    return seen


def double(module: nn.Module, _: Any) -> None:
    module.weight.data.mul_(2)


def train_with_changes(rank: int, size: int, plans: list[dict[str, Any]]) -> list[Any]:
    found = []
    for plan in plans:
        model = without_dropout(models.build("llama", num_hidden_layers=2))
        plain = copy.deepcopy(model)
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        plain_optimizer = optimizer_of(plain)
        batch = models.batch("llama", 0)
        plain(**batch).loss.backward()
        wanted = change_gradients(plain)
        model(**batch).loss.backward()
        part = model.model.layers[0].mlp.up_proj.weight.grad
        with unbounded.full_params(model):
            found.append((change_gradients(model, holds=rank == 0), wanted))
            whole = model.model.layers[0].mlp.up_proj.weight.grad
            with pytest.raises(unbounded.StateError, match=r"take p\.grad again"):
                part.sum()
        with pytest.raises(unbounded.StateError, match=r"take p\.grad again"):
            whole.sum()
        norms = optimizer.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        found.append(([float(norms[0])], [float(norms[1])]))
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        assert worst_error(model.state_dict(), plain.state_dict())[0] < 1e-4
        with torch.no_grad(), unbounded.full_params(model):
            for one in (model, plain):
                for parameter in one.parameters():
                    parameter.mul_(3)
            found.append(([float(model(**batch).loss)], [float(plain(**batch).loss)]))
            layer = model.model.layers[0].mlp.up_proj
            hook = layer.register_forward_pre_hook(double)
            with pytest.raises(unbounded.StateError, match=r"has changed the parameter '.*up_proj.weight', of which"):
                model(**batch)
            hook.remove()
        assert worst_error(model.state_dict(), plain.state_dict())[0] < 1e-4
    return found


def test_inside_full_params_gradients_are_whole_and_forwards_have_what_is_written(ranks: Any) -> None:
    """The plan with four parts also has key heads that two ranks hold."""
    for per_rank in ranks(4, train_with_changes, [{"tensor": 2}, {"tensor": 4, "gradients": "host"}]):
        for seen, wanted in per_rank:
            assert seen == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def call_decoder(rank: int, size: int, family: str) -> list[str]:
    """Which plans and lengths give other states than the plain model, after a backward that recomputed blocks."""
    different = []
    for plan in ({"tensor": 2, "sequence": True}, {"context": 2}):
        plain = without_dropout(models.build(family))
        model = copy.deepcopy(plain)
        model, _ = unbounded.shard(model, optimizer_of(model), {**plan, "activations": "recompute"})
        model(**models.batch(family, 0)).loss.backward()
        for length in (8, 5):
            tokens = models.batch(family, 0)["input_ids"][:, :length]
            with torch.no_grad():
                found, wanted = (one.model(tokens, use_cache=False).last_hidden_state for one in (model, plain))
            if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                different.append(f"{plan}, {length} tokens")
    return different


def test_a_model_inside_may_be_called_after_blocks_were_recomputed(ranks: Any) -> None:
    """As `peft` does to generate: nothing that happens when the whole model is called has happened then."""
    assert ranks(2, call_decoder, "llama") == [[], []]


class Rectified(nn.Module):
    """Blocks with a trained activation between the layers that are cut, which they may share, and one after them."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RectifiedBlock() for _ in range(2))
        if shares:
            self.blocks[1].inside = self.blocks[0].inside
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RectifiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.inside, self.after = nn.PReLU(), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.down(self.inside(self.up(self.norm(x)))))


def rectify(rank: int, size: int, activations: str, sequence: bool, shares: bool) -> dict[str, float]:
    """By how much each parameter differs from those of the plain model after three steps."""
    torch.manual_seed(0)
    plain = Rectified(shares)
    model, batch = copy.deepcopy(plain), torch.randn(2, 8, 16)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    plan = {"tensor": size, "styles": (("blocks.*.up", "column"), ("blocks.*.down", "row")), "activations": activations}
    model, optimizer = unbounded.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.5), {**plan, "sequence": sequence}
    )
    for _ in range(3):
        for one, steps in ((plain, other), (model, optimizer)):
            one(batch).square().mean().backward()
            steps.step()
            steps.zero_grad()
    found = model.state_dict()
    return {name: float((found[name] - value).abs().max()) for name, value in plain.state_dict().items()}


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("activations", "sequence"), [("keep", False), ("recompute", False), ("keep", True)])
def test_trained_activations_between_layers_that_are_cut_get_whole_gradients(
    ranks: Any, activations: str, sequence: bool, shares: bool
) -> None:
    for differences in ranks(2, rectify, activations, sequence, shares):
        assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=1e-6)
