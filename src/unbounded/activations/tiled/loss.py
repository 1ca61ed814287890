"""Cross-entropy without logits: the head's product and the loss over tiles of tokens.

Logits of 16k tokens over 128k classes are 4 GiB in bf16, and the plain loss holds them three to five times. Here a
tile of them exists at a time. Its gradient is made while it is there, so the head has three products, as in the plain
loss, and only the gradients of the hidden states and of the head are kept for the backward.

Note: adding up the head's gradient. Up to MOST_ROUNDED tiles add to it in its own dtype, which rounds once per tile;
with more of them the sum is kept in fp32 (and always for fp16, whose range it would leave). The loss's factor, 1 /
count or what the user multiplied it by, is applied in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from unbounded.activations.tiled.entropy import Entropy, Vocabulary
from unbounded.activations.tiled.entropy_rows import EntropyRows
from unbounded.errors import PlanError
from unbounded.planner.sizes import format_bytes, parse_bytes
from unbounded.planner.step.logits import TILE_BYTES

MOST_ROUNDED = 12
# Classes whose gradient is added in fp32 at a time.
CLASSES_AT_ONCE = 8192


class Projection(Protocol):
    """Makes logits of rows, and carries their gradient back. `tensors` are what it reads."""

    tensors: list[torch.Tensor]
    num_rows: int
    num_classes: int

    def begin(self, wanted: Sequence[bool], num_tiles: int) -> None: ...

    def forward(self, start: int, stop: int) -> torch.Tensor: ...

    def backward(self, start: int, stop: int, gradient: torch.Tensor) -> None: ...

    def gradients(self) -> list[torch.Tensor | None]: ...


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: str = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    tile_bytes: int | str | None = None,
    vocabulary: Vocabulary | None = None,
) -> torch.Tensor:
    """The cross-entropy of `hidden @ weight.T + bias` with `labels`, which never holds all of the logits.

    `hidden` is (..., width), `weight` (classes, width), `labels` (...) already shifted. The loss is summed over labels
    that are not `ignore_index` and divided by their number ("mean"), by nothing ("sum"), or by `num_items_in_batch`.
    Logits are `scale` times the product, capped to `softcap` by a tanh; `z_loss` times the squared logsumexp is added.
    Logits are made in the dtype of `hidden` and the loss in fp32, as in Hugging Face. If each rank holds a part of the
    vocabulary, `vocabulary` joins them. A gradient of the gradient is not available.
    """
    if reduction not in ("mean", "sum"):
        raise PlanError(f'reduction is {reduction!r}, but it must be "mean" or "sum".')
    if labels.shape != hidden.shape[:-1]:
        raise PlanError(
            f"hidden is {tuple(hidden.shape)}, so labels must be {tuple(hidden.shape[:-1])}, but they are "
            f"{tuple(labels.shape)}. Give one label for every row."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise PlanError(f"labels are {labels.dtype}, but each must be the number of a class. Give whole numbers.")
    labels = labels.long()
    entropy = Entropy(ignore_index, label_smoothing, z_loss, softcap, scale, vocabulary)
    rows = hidden.reshape(-1, hidden.shape[-1])
    head = values_of(weight, bias)
    if torch.is_autocast_enabled(rows.device.type):
        lowered = torch.get_autocast_dtype(rows.device.type)
        rows, head = rows.to(lowered), [tensor.to(lowered) for tensor in head]
    # The same number of rows on all ranks that hold a part of the vocabulary.
    num_classes = weight.shape[0] if vocabulary is None else -(-vocabulary.size // vocabulary.num_parts)
    row_bytes = num_classes * rows.dtype.itemsize
    tile_rows = choose_tile_rows(row_bytes, tile_bytes, rows.device)
    total = sum_of_losses(LinearProjection(rows, *head), labels.reshape(-1), entropy, tile_rows)
    if num_items_in_batch is not None:
        divisor = num_items_in_batch
        return total / (divisor.to(total.device) if isinstance(divisor, torch.Tensor) else divisor)
    return total if reduction == "sum" else mean_of(total, labels, ignore_index)


def mean_of(total: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The summed loss over the number of labels. Without any it is NaN, as in torch, and its gradients are zeros."""
    count = (labels != ignore_index).sum().to(total.device)
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def entropy_of_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    vocabulary: Vocabulary | None = None,
    early: LabelRange | None = None,
) -> torch.Tensor:
    """The summed cross-entropy of logits that exist, (rows, classes), computed in fp32 without a copy of them in fp32.

    If each rank has the logits of a part of the vocabulary, `vocabulary` joins them. `early` is the labels' range.
    """
    entropy = Entropy(ignore_index, vocabulary=vocabulary)
    check = _check_labels(labels, entropy, logits.shape[1], early)
    num_classes = logits.shape[1] if vocabulary is None else -(-vocabulary.size // vocabulary.num_parts)
    tile_rows = choose_tile_rows(num_classes * logits.dtype.itemsize, None, logits.device)
    total: torch.Tensor = _LogitsLoss.apply(logits, labels.to(logits.device), entropy, tile_rows)
    check()
    return total


def values_of(*parameters: torch.Tensor | None) -> list[torch.Tensor]:
    """The given tensors as ordinary tensors. A view goes through a parameter's own functions, so a sharded one gives
    its value.
    """
    return [parameter.view(parameter.shape) for parameter in parameters if parameter is not None]


def choose_tile_rows(row_bytes: int, tile_bytes: int | str | None, device: torch.device) -> int:
    """How many rows of logits a tile holds: a multiple of 128 if possible."""
    if tile_bytes is None:
        return _round(max(1, TILE_BYTES.get(device.type, TILE_BYTES["cpu"]) // max(1, row_bytes)))
    wanted = parse_bytes(tile_bytes, "tile_bytes")
    if wanted < row_bytes:
        raise PlanError(
            f"tile_bytes is {format_bytes(wanted)}, but one row of logits takes {format_bytes(row_bytes)}. "
            f"Raise it to at least {row_bytes} bytes."
        )
    return _round(wanted // max(1, row_bytes))


def _round(rows: int) -> int:
    return rows // 128 * 128 if rows >= 128 else rows


def sum_of_losses(
    projection: Projection,
    labels: torch.Tensor,
    entropy: Entropy,
    tile_rows: int,
    early: LabelRange | None = None,
) -> torch.Tensor:
    """The summed loss of all rows of a projection. `early` is the range of what the labels are taken from."""
    check = _check_labels(labels, entropy, projection.num_classes, early)
    labels = labels.to(projection.tensors[0].device)
    total: torch.Tensor = _TiledLoss.apply(
        projection, labels, entropy, tile_rows, torch.is_grad_enabled(), *projection.tensors
    )
    check()
    return total


class LabelRange:
    """The lowest and highest label, read from a GPU while other work goes on."""

    def __init__(self, labels: torch.Tensor, ignore_index: int) -> None:
        self.ignore_index = ignore_index
        self._event = None
        self._ends = torch.tensor([2**62, -(2**62)], dtype=torch.long, device="cpu")
        if labels.numel() == 0:
            return
        counted = labels != ignore_index
        wide = labels.long()
        self._ends = torch.stack(
            [torch.where(counted, wide, 2**62).amin(), torch.where(counted, wide, -(2**62)).amax()]
        )
        if labels.is_cuda:
            ends = torch.empty(2, dtype=torch.long, device="cpu", pin_memory=True)
            self._ends = ends.copy_(self._ends, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(labels.device))

    def is_below(self, num_classes: int) -> bool:
        """Waits for the labels, on a GPU also for what was launched before them."""
        if self._event is not None:
            self._event.synchronize()
        low, high = self._ends.tolist()
        return bool(low > high or (low >= 0 and high < num_classes))  # none, or all are

    def check(self, num_classes: int) -> None:
        if not self.is_below(num_classes):
            low, high = self._ends.tolist()
            raise PlanError(
                f"the labels go from {low} to {high}, but the head has {num_classes} classes. Labels must lie between "
                f"0 and {num_classes - 1}, or be ignore_index ({self.ignore_index})."
            )


def _check_labels(
    labels: torch.Tensor, entropy: Entropy, num_here: int, early: LabelRange | None
) -> Callable[[], None]:
    """To be called when all work is launched. If an early look at the labels was fine, nobody waits for that work."""
    num_classes = num_here if entropy.vocabulary is None else entropy.vocabulary.size
    if early is None or early.ignore_index != entropy.ignore_index or not early.is_below(num_classes):
        found = LabelRange(labels, entropy.ignore_index)
        return lambda: found.check(num_classes)
    return lambda: None


class _TiledLoss(torch.autograd.Function):
    """Gradients are made with the loss, tile by tile, and kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        projection: Projection,
        labels: torch.Tensor,
        entropy: Entropy,
        tile_rows: int,
        has_graph: bool,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [has_graph and needed for needed in ctx.needs_input_grad[5:]]
        starts = range(0, projection.num_rows, tile_rows)
        projection.begin(wanted, len(starts))
        total = torch.zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32), device=labels.device)
        for start in starts:
            stop = min(start + tile_rows, projection.num_rows)
            logits = projection.forward(start, stop)
            rows = EntropyRows(logits, labels[start:stop], entropy)
            total += rows.losses().sum()
            if any(wanted):
                projection.backward(start, stop, rows.write_gradient(logits))
        gradients = projection.gradients()
        ctx.has = [gradient is not None for gradient in gradients]
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        is_last = _keeps_graph is not None and not _keeps_graph()
        kept, gradients = iter(ctx.saved_tensors), []
        for has, dtype in zip(ctx.has, ctx.dtypes, strict=True):
            gradients.append(_scale(next(kept), factor, dtype, in_place=is_last) if has else None)
        return None, None, None, None, None, *gradients


class _LogitsLoss(torch.autograd.Function):
    """Of logits that exist. The backward makes their gradient, and needs only a few numbers of each row besides."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, entropy: Entropy, tile_rows: int
    ) -> torch.Tensor:
        tiles = zip(logits.split(tile_rows), labels.split(tile_rows), strict=True)
        ctx.rows = [EntropyRows(*tile, entropy) for tile in tiles]
        ctx.tile_rows = tile_rows
        ctx.save_for_backward(logits)
        losses = [rows.losses().sum() for rows in ctx.rows]
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        tiles = zip(ctx.rows, logits.split(ctx.tile_rows), gradient.split(ctx.tile_rows), strict=True)
        for rows, tile, out in tiles:
            rows.write_gradient(tile, out=out, factor=factor)
        return gradient, None, None, None


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def _scale(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, *, in_place: bool) -> torch.Tensor:
    """Scales in place if nobody will ask for it again: the head's gradient is the largest tensor here."""
    return (gradient.mul_(factor) if in_place else gradient * factor).to(dtype)


class LinearProjection:
    """Rows times a weight. One buffer serves all tiles; the products write into what they are added to."""

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if rows.shape[1] != weight.shape[1]:
            raise PlanError(
                f"hidden is {rows.shape[1]} wide, but the head's weight is {tuple(weight.shape)}. "
                "Give a weight of (classes, width)."
            )
        self.tensors = [rows, weight] + ([bias] if bias is not None else [])
        self.num_rows, self.num_classes = rows.shape[0], weight.shape[0]

    def begin(self, wanted: Sequence[bool], num_tiles: int) -> None:
        self._rows, self._weight, *rest = (tensor.detach() for tensor in self.tensors)
        self._bias = rest[0] if rest else None
        self._buffer: torch.Tensor | None = None
        self._row_grad = torch.empty_like(self._rows) if wanted[0] else None
        self._weight_grad = self._zeros(self._weight, num_tiles) if wanted[1] else None
        self._bias_grad = self._zeros(self._bias, math.inf) if self._bias is not None and wanted[2] else None

    def _zeros(self, tensor: torch.Tensor, num_tiles: float) -> torch.Tensor:
        is_wide = num_tiles > MOST_ROUNDED or tensor.dtype == torch.float16
        dtype = torch.promote_types(tensor.dtype, torch.float32) if is_wide else tensor.dtype
        return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)

    def forward(self, start: int, stop: int) -> torch.Tensor:
        rows, weight = self._rows[start:stop], self._weight
        if self._buffer is None:
            self._buffer = torch.empty(stop - start, weight.shape[0], dtype=rows.dtype, device=rows.device)
        logits = self._buffer[: stop - start]
        if self._bias is not None:
            return torch.addmm(self._bias, rows, weight.t(), out=logits)
        return torch.mm(rows, weight.t(), out=logits)

    def backward(self, start: int, stop: int, gradient: torch.Tensor) -> None:
        rows = self._rows[start:stop]
        if self._row_grad is not None:
            torch.mm(gradient, self._weight, out=self._row_grad[start:stop])
        if self._weight_grad is not None:
            if self._weight_grad.dtype == rows.dtype:
                self._weight_grad.addmm_(gradient.t(), rows)
            else:
                for low in range(0, gradient.shape[1], CLASSES_AT_ONCE):
                    part = gradient[:, low : low + CLASSES_AT_ONCE]
                    self._weight_grad[low : low + CLASSES_AT_ONCE].add_(torch.mm(part.t(), rows))
        if self._bias_grad is not None:
            self._bias_grad.add_(gradient.sum(0, dtype=self._bias_grad.dtype))

    def gradients(self) -> list[torch.Tensor | None]:
        self._buffer = None
        found = [self._row_grad, self._weight_grad] + ([self._bias_grad] if self._bias is not None else [])
        # fp16 is kept in fp32 until the factor comes, because a sum over tokens may be outside its range.
        return [
            gradient.to(tensor.dtype) if gradient is not None and tensor.dtype != torch.float16 else gradient
            for gradient, tensor in zip(found, self.tensors, strict=True)
        ]
