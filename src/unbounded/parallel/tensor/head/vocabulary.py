"""The head and the cross entropy of a vocabulary that is cut over the tensor axis: logits stay where they are made.

In training with labels, a transformers model's loss is computed from each rank's part of the logits, with one exchange
of two numbers per token; the logits in its output are joined when somebody looks at them. Whoever asks for parts
(`HeadPart.kept`) gets parts. In every other forward, and in models that compute their own loss, logits are joined.
Deferred logits (of a tiled loss) compute their loss themselves, from what `HeadPart` says about the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unbounded.parallel import collectives
from unbounded.parallel.attachments import Detach, replace_forward
from unbounded.parallel.blocks import asked_loss
from unbounded.parallel.collectives import LayerSite
from unbounded.parallel.tensor.head.whole_logits import WholeLogits
from unbounded.parallel.tensor.layers import check_classes
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.ranks.cut import Cut

# The losses of transformers that are the mean cross entropy over tokens, and whether each shifts its labels.
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token from this rank's classes [start, start + width); zero if a token is ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, ignore_index: int, site: LayerSite
    ) -> torch.Tensor:
        inside = labels - start
        is_here = (inside >= 0) & (inside < logits.shape[-1])
        inside = inside.masked_fill(~is_here, 0)
        own = logits.gather(-1, inside.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
        stacked = torch.stack([logits.logsumexp(-1), own]).unsqueeze(0)
        told = collectives.join_parts(stacked, 0, site, "the loss")
        total = told[:, 0].logsumexp(0)
        is_counted = labels != ignore_index
        ctx.save_for_backward(logits, total, inside, is_here, is_counted)
        return (total - told[:, 1].sum(0)).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, total, inside, is_here, is_counted = ctx.saved_tensors
        part = (logits - total.unsqueeze(-1)).exp_()
        part.scatter_add_(-1, inside.unsqueeze(-1), -is_here.unsqueeze(-1).to(part.dtype))
        part.mul_((gradient * is_counted).unsqueeze(-1))
        return part, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    site: LayerSite,
    *,
    start: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """All ranks of the axis must call this. The cross entropy of `logits`: this rank's classes, from `start` on."""
    losses = _CrossEntropy.apply(logits, labels, start, ignore_index, site)
    if reduction == "none":
        return losses
    count = (labels != ignore_index).sum()
    # Without labels it is NaN, as in torch, and its gradients are zeros.
    return losses.sum() if reduction == "sum" else torch.where(count > 0, losses.sum() / count.clamp(min=1), torch.nan)


class HeadPart:
    """This rank's part of the vocabulary, for code that uses the head's weight: see `Vocabulary` in the loss."""

    def __init__(self, scene: Scene, site: LayerSite, cut: Cut) -> None:
        self.scene, self.site = scene, site
        self.has_labels = False  # in the running forward, if its loss is computed from parts of the logits
        self.is_asked = False  # whoever calls the model asks for parts
        self.size, self.num_parts = cut.shape[cut.dim], scene.axis.size
        self.start, stop = cut.intervals[0]
        self.width = stop - self.start

    def keeps(self) -> bool:
        """Whether this forward's logits are used only by the loss."""
        return self.is_asked or (self.has_labels and torch.is_grad_enabled())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, forwards of the model give each rank the logits of its own classes."""
        self.is_asked = True
        try:
            yield
        finally:
            self.is_asked = False

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, the same on all ranks, for a product with the part: its gradients are summed."""
        entered = self.scene.enter(x, self.site)
        self.scene.hold = Hold.COPIES
        return entered

    def max(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks of the axis must call this."""
        return self.site.axis.max(rows, "the largest logits of the loss")

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks of the axis must call this."""
        return collectives.sum_parts(rows, self.site, "the loss")


def attach_head(module: nn.Module, part: HeadPart) -> Detach:
    """The last layer: gives its part of the logits if the loss wants parts, otherwise joined ones."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def head(x: torch.Tensor) -> torch.Tensor:
            logits = forward(part.enter(x))
            return logits if part.keeps() else collectives.join(logits, -1, part.site, part.size)

        return head

    return replace_forward(module, make)


class TokenLoss:
    """The loss of a transformers model, from joined logits or from parts of them."""

    def __init__(self, base: nn.Module, part: HeadPart) -> None:
        self.base, self.part = base, part
        self._plain: Callable[..., torch.Tensor] = base.loss_function  # type: ignore[assignment]
        self._parts: torch.Tensor | None = None  # the logits that the running forward's loss was given
        self.__name__ = self._plain.__name__

    @staticmethod
    def fits(base: nn.Module) -> bool:
        """Whether a model's forward calls its `loss_function`, and that is a cross entropy over tokens."""
        return asked_loss(base) in _SHIFTS

    def attach(self) -> Detach:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            is_ours = self.base.loss_function is self  # the user may have given the model another loss since
            self.part.has_labels = is_ours and kwargs.get("labels") is not None

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            parts, self._parts = self._parts, None
            if parts is None or self.part.is_asked:
                return None
            if isinstance(output, tuple):
                return tuple(self._whole(value) if value is parts else value for value in output)
            for name in [name for name, value in output.items() if value is parts]:
                output[name] = self._whole(parts)
            return output

        handles = [
            self.base.register_forward_pre_hook(before, with_kwargs=True),
            self.base.register_forward_hook(after),
        ]
        self.base.loss_function = self  # type: ignore[assignment]

        def detach() -> None:
            for handle in handles:
                handle.remove()
            if self.base.loss_function is self:
                del self.base._loss_function

        return detach

    def _whole(self, parts: torch.Tensor) -> torch.Tensor:
        made = getattr(parts, "make", lambda: parts)  # of deferred logits
        return WholeLogits(parts, self.part.size, lambda: collectives.join(made(), -1, self.part.site, self.part.size))

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not self.part.keeps():
            given = {} if shift_labels is None else {"shift_labels": shift_labels}
            return self._plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, **given, **kwargs)
        self._parts = logits
        if type(logits) is not torch.Tensor:  # deferred logits, which compute the loss of their part in tiles
            given = {} if shift_labels is None else {"shift_labels": shift_labels}
            width = logits.shape[-1]
            return self._plain(logits, labels, width, num_items_in_batch, ignore_index, **given, **kwargs)
        if shift_labels is None:
            shift_labels = labels
            if _SHIFTS[self._plain.__name__]:
                shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        wanted = shift_labels.reshape(-1).to(logits.device)
        check_classes(wanted, self.part.size, "labels", ignore_index)
        losses = cross_entropy(
            logits.float().reshape(wanted.numel(), -1),
            wanted,
            self.part.site,
            start=self.part.start,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return losses if num_items_in_batch is None else losses / num_items_in_batch
