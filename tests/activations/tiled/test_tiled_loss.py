"""The tiled cross-entropy against the plain one, over tiles that do not divide the tokens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unbounded
from unbounded.activations.tiled.loss import LabelRange, entropy_of_logits
from unbounded.errors import PlanError
from unbounded.planner.step.logits import TILE_BYTES

ROWS, WIDTH, CLASSES = 23, 8, 37


def make(dtype: torch.dtype = torch.float64, *, bias: bool = True, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[3] = labels[17] = -100
    head = {"hidden": draw(ROWS, WIDTH), "weight": draw(CLASSES, WIDTH)}
    return head | {"bias": draw(CLASSES) if bias else None, "labels": labels}


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    num_items_in_batch: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """What Hugging Face computes, written out."""
    logits = nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels != options.get("ignore_index", -100)
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum", **options)
    loss = loss + z_loss * (logits.logsumexp(-1).square() * counted).sum()
    if num_items_in_batch is not None:
        return loss / num_items_in_batch
    return loss / counted.sum() if reduction == "mean" else loss


def run(function: Any, inputs: dict[str, Any], factor: float = 1.0, **options: Any) -> list[Tensor]:
    """The loss and the gradients of hidden states, weight and bias."""
    loss = function(**inputs, **options)
    wanted = [tensor for tensor in inputs.values() if tensor is not None and tensor.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss * factor, wanted)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= tolerance * other.double().norm()


def tiles(rows: int, itemsize: int = 8) -> int:
    return rows * CLASSES * itemsize


@pytest.mark.parametrize("tile_rows", [1, 5, 22, 23, 1000])
def test_every_option_equals_the_plain_loss(tile_rows: int) -> None:
    for softcap, smoothing, z_loss, reduction in itertools.product(
        [None, 2.0], [0.0, 0.1], [0.0, 0.01], ["mean", "sum"]
    ):
        options = {"softcap": softcap, "label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
        inputs = make(bias=softcap is None)
        found = run(unbounded.tiled_cross_entropy, inputs, 0.25, scale=0.5, tile_bytes=tiles(tile_rows), **options)
        assert_close(found, run(plain, inputs, 0.25, scale=0.5, **options), 1e-12)


@pytest.mark.parametrize("count", [40, torch.tensor(40)])
def test_the_number_of_items_in_a_batch_divides_the_sum(count: Any) -> None:
    inputs = make()
    found = run(unbounded.tiled_cross_entropy, inputs, num_items_in_batch=count, tile_bytes=tiles(4))
    assert_close(found, run(plain, inputs, num_items_in_batch=40), 1e-12)


# Products round to the dtype in both; the head's gradient is rounded once more for every tile, or added in fp32.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("tile_rows", [2, 6])
def test_lower_precision_is_right_to_its_rounding(dtype: torch.dtype, tolerance: float, tile_rows: int) -> None:
    inputs = make(dtype)
    options: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 4.0}
    found = run(unbounded.tiled_cross_entropy, inputs, tile_bytes=tiles(tile_rows, dtype.itemsize), **options)
    assert found[0].dtype == torch.float32
    exact = run(
        plain,
        {k: v.detach().double().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()},
        **options,
    )
    assert_close(found, [value.to(one.dtype) for value, one in zip(exact, found, strict=True)], tolerance)


def test_half_precision_keeps_what_a_scaled_loss_brings_into_its_range() -> None:
    """Unscaled, the gradients of a mean over many tokens are too small for fp16, and sums over tokens too large."""
    torch.manual_seed(0)
    hidden = (torch.randn(4000, 4) * 60).half().requires_grad_()
    weight = (torch.randn(7, 4) * 1e-3).half().requires_grad_()
    labels = torch.zeros(4000, dtype=torch.long)
    found = run(unbounded.tiled_cross_entropy, {"hidden": hidden, "weight": weight, "labels": labels}, 1024.0)
    exact = {"hidden": hidden.detach().double().requires_grad_(), "weight": weight.detach().double().requires_grad_()}
    expected = run(plain, {**exact, "labels": labels, "bias": None}, 1024.0)
    assert torch.isfinite(found[2]).all()
    assert_close(found, [value.to(one.dtype) for value, one in zip(expected, found, strict=True)], 5e-3)


def test_rows_may_have_more_than_one_dim_and_the_graph_may_be_kept() -> None:
    inputs = make()
    expected = run(plain, inputs)
    narrow = inputs["labels"].to(torch.uint8)[None]  # torch takes these too; -100 becomes 156
    folded = inputs | {"hidden": inputs["hidden"][None], "labels": narrow, "ignore_index": 156}
    loss = unbounded.tiled_cross_entropy(**folded, tile_bytes=tiles(7))
    wanted = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    for _ in range(2):
        assert_close(list(torch.autograd.grad(loss, wanted, retain_graph=True)), expected[1:], 1e-12)


def test_frozen_parts_get_no_gradient_and_no_grad_makes_none() -> None:
    inputs = make()
    inputs["weight"].requires_grad_(False)
    assert_close(run(unbounded.tiled_cross_entropy, inputs, tile_bytes=tiles(4)), run(plain, inputs), 1e-12)
    with torch.no_grad():
        assert not unbounded.tiled_cross_entropy(**inputs).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_it_compute_it_again(reentrant: bool) -> None:
    inputs = make()
    labels = inputs.pop("labels")

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return unbounded.tiled_cross_entropy(hidden, weight, labels, bias, tile_bytes=tiles(6))

    loss = torch.utils.checkpoint.checkpoint(compute, *inputs.values(), use_reentrant=reentrant)
    loss.backward()
    expected = run(plain, make())
    assert_close([loss.detach(), *(tensor.grad for tensor in inputs.values())], expected, 1e-12)


def test_autocast_lowers_the_product_and_not_the_loss() -> None:
    inputs = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(unbounded.tiled_cross_entropy, inputs, tile_bytes=tiles(5, 2))
        expected = run(plain, inputs)
    assert_close(found, expected, 1e-2)


def test_no_counted_labels_give_what_torch_gives() -> None:
    inputs = make() | {"labels": torch.full((ROWS,), -100)}
    loss, *gradients = run(unbounded.tiled_cross_entropy, inputs)
    assert torch.isnan(loss)
    assert loss.isnan() == run(plain, inputs)[0].isnan()
    assert all(gradient.abs().sum() == 0 for gradient in gradients)  # a batch without labels spoils no weights
    total, *gradients = run(unbounded.tiled_cross_entropy, inputs, reduction="sum")
    assert total == 0
    assert all(gradient.abs().sum() == 0 for gradient in gradients)


def test_only_a_tile_of_logits_exists_at_a_time() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            outputs = func(*args, **(kwargs or {}))
            for tensor in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return outputs

    hidden, weight = torch.randn(4096, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    with Watch():
        unbounded.tiled_cross_entropy(
            hidden, weight, torch.zeros(4096, dtype=torch.long), tile_bytes=128 * 512 * 4
        ).backward()
    assert largest == 128 * 512


# -- a vocabulary over ranks ---------------------------------------------------------------------------------------


class Parts:
    """The classes of two ranks of unequal size, joined by torch's own collectives."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size, self.num_parts = start, size, 2

    def max(self, rows: Tensor) -> Tensor:
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        return rows

    def sum(self, rows: Tensor) -> Tensor:
        dist.all_reduce(rows)
        return rows


def loss_of_part(rank: int, world_size: int) -> list[Tensor]:
    inputs, cut = make(), 21
    mine = slice(0, cut) if rank == 0 else slice(cut, CLASSES)
    part = {name: inputs[name].detach()[mine].requires_grad_() for name in ("weight", "bias")}
    vocabulary = Parts(mine.start, CLASSES)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "tile_bytes": tiles(4)}
    return run(unbounded.tiled_cross_entropy, inputs | part, vocabulary=vocabulary, **options)


def test_ranks_may_hold_a_part_of_the_vocabulary_each(ranks: Any) -> None:
    first, second = ranks(2, loss_of_part)
    loss, hidden, weight, bias = run(plain, make(), label_smoothing=0.1, z_loss=0.01, softcap=3.0)
    joined = [first[0], first[1] + second[1], torch.cat([first[2], second[2]]), torch.cat([first[3], second[3]])]
    assert_close(joined, [loss, hidden, weight, bias], 1e-12)
    assert torch.equal(first[0], second[0])


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tile_bytes": 100},
            r"tile_bytes is 100 B, but one row of logits takes 296 B. Raise it to at least 296 bytes",
        ),
        (
            {"labels": torch.full((ROWS,), CLASSES)},
            r"labels go from 37 to 37, but the head has 37 classes. .* 0 and 36",
        ),
        ({"labels": torch.full((ROWS,), -1)}, r"labels go from -1 to -1.*or be ignore_index \(-100\)"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"labels must be \(23,\), but they are \(4,\)"),
        ({"labels": torch.zeros(ROWS)}, r"labels are torch.float32, but each must be the number of a class"),
        ({"weight": torch.zeros(CLASSES, 3)}, r"hidden is 8 wide, but the head's weight is \(37, 3\)"),
        ({"reduction": "none"}, "reduction is 'none', but it must be"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5, but it must lie between 0 and 1"),
        ({"softcap": 0.0}, "softcap is 0.0, but it must be larger than 0"),
        ({"z_loss": -1.0}, "z_loss is -1.0, but it must be at least 0"),
    ],
)
def test_bad_input_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        unbounded.tiled_cross_entropy(**(make() | changes))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-3)])
def test_the_loss_of_logits_that_exist_leaves_them_alone(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILE_BYTES, "cpu", 5 * CLASSES * dtype.itemsize)  # five rows at a time
    labels = make()["labels"]
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64).to(dtype).requires_grad_()
    before = logits.detach().clone()
    loss = entropy_of_logits(logits, labels)
    wanted = nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
    found = [loss.detach().double(), *torch.autograd.grad(loss * 0.3, logits, retain_graph=True)]
    expected = [wanted.detach(), *torch.autograd.grad(wanted * 0.3, logits)]
    assert_close(found, expected, tolerance)
    assert torch.equal(logits, before)
    assert torch.equal(*torch.autograd.grad(loss * 0.3, logits), found[1])
    with pytest.raises(PlanError, match=f"labels go from 0 to {CLASSES}"):
        entropy_of_logits(logits, torch.tensor([0] * (ROWS - 1) + [CLASSES]))


def test_labels_that_were_looked_at_early_are_not_waited_for_and_never_wrong_in_silence() -> None:
    logits, good = torch.zeros(3, CLASSES), torch.tensor([0, -100, CLASSES - 1])
    bad = torch.tensor([0, 1, CLASSES])
    early = LabelRange(good, -100)
    assert float(entropy_of_logits(logits, good, early=early)) == pytest.approx(2 * math.log(CLASSES))
    assert math.isnan(float(entropy_of_logits(logits, bad, early=early)))  # labels that were changed after the look
    assert float(entropy_of_logits(logits, good, early=LabelRange(bad, -100))) > 0  # the loss has its own look
    for early in (LabelRange(bad, -100), LabelRange(good, -1), None):
        with pytest.raises(PlanError, match=f"labels go from 0 to {CLASSES}"):
            entropy_of_logits(logits, bad, early=early)
    assert float(entropy_of_logits(logits, torch.full((3,), -100))) == 0
