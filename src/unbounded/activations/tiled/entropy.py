"""Cross-entropy of rows of logits as two passes over a tile, here in torch, for any device.

The first takes four numbers of every row (`RowSums`), which ranks that each hold a part of the vocabulary can add up;
the second turns the logits into the gradient of the summed loss, in place. On a GPU the kernels of `entropy_kernels`
do the same without copies in fp32; `entropy_rows` chooses between them.

    z    = cap * tanh(scale * logit / cap)          (without a cap: scale * logit)
    loss = logsumexp(z) - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * logsumexp(z)^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from unbounded.errors import PlanError


class Vocabulary(Protocol):
    """The part of a vocabulary that this rank's head has, and how rows of numbers are joined over all parts.

    `start` is the first class of the part, `size` the number of classes in all, over `num_parts`. All ranks that hold
    parts must call `max` and `sum` together; both may work in place. The gradient of the hidden states is that of this
    part: whoever gave the same hidden states to all parts adds them up.
    """

    start: int
    size: int
    num_parts: int

    def max(self, rows: torch.Tensor) -> torch.Tensor: ...

    def sum(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Entropy:
    """How logits become a loss."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise PlanError(f"label_smoothing is {self.label_smoothing}, but it must lie between 0 and 1.")
        if self.z_loss < 0.0:
            raise PlanError(f"z_loss is {self.z_loss}, but it must be at least 0.")
        if self.softcap is not None and self.softcap <= 0.0:
            raise PlanError(f"softcap is {self.softcap}, but it must be larger than 0. Leave it out for no cap.")


class RowSums(NamedTuple):
    """For every row, in fp32 or wider: its maximum, the sum of exp(z - maximum), z at the label, the sum of z."""

    maximum: torch.Tensor
    exponentials: torch.Tensor
    labelled: torch.Tensor
    total: torch.Tensor

    def join(self, vocabulary: Vocabulary) -> RowSums:
        """All ranks that hold parts of the vocabulary must call this."""
        maximum = vocabulary.max(self.maximum.clone())
        local = self.exponentials * (self.maximum - maximum).exp()
        exponentials, labelled, total = vocabulary.sum(torch.stack([local, self.labelled, self.total]))
        return RowSums(maximum, exponentials, labelled, total)


class TorchKernels:
    """The two passes in torch. Each holds a copy of the tile in fp32."""

    @staticmethod
    def sum_rows(logits: torch.Tensor, labels: torch.Tensor, entropy: Entropy) -> RowSums:
        z = _shape(logits, entropy)
        maximum = z.amax(1)
        labelled = torch.where(labels >= 0, z.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
        total = z.sum(1) if entropy.label_smoothing else torch.zeros_like(maximum)
        return RowSums(maximum, (z - maximum[:, None]).exp_().sum(1), labelled, total)

    @staticmethod
    def write_gradient(
        logits: torch.Tensor,
        out: torch.Tensor,
        labels: torch.Tensor,
        entropy: Entropy,
        logsumexp: torch.Tensor,
        factor: torch.Tensor,
        kept: torch.Tensor,
        num_classes: int,
    ) -> None:
        z = _shape(logits, entropy)
        gradient = (z - logsumexp[:, None]).exp_().mul_(factor[:, None])
        if entropy.label_smoothing:
            gradient.sub_((kept * (entropy.label_smoothing / num_classes))[:, None])
        here = (labels >= 0).to(kept.dtype) * kept * (entropy.label_smoothing - 1.0)
        gradient.scatter_add_(1, labels.clamp(min=0)[:, None], here[:, None])
        if entropy.softcap is not None:
            gradient.mul_(1.0 - (z / entropy.softcap).square_())
        if entropy.scale != 1.0:
            gradient.mul_(entropy.scale)
        out.copy_(gradient)


def _shape(logits: torch.Tensor, entropy: Entropy) -> torch.Tensor:
    """The logits in fp32 or wider, scaled and capped."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if entropy.scale != 1.0:
        z = z * entropy.scale
    if entropy.softcap is not None:
        z = torch.tanh(z / entropy.softcap) * entropy.softcap
    return z
