"""The loss of a tile of logits, row by row, and its gradient in their place, with the right kernels for the device."""

from __future__ import annotations

import torch

from unbounded.activations.tiled.entropy import Entropy, TorchKernels


class EntropyRows:
    """The loss of one tile of rows. `labels` are whole-vocabulary classes; ignored rows come out as 0.

    A label that is no class makes the loss NaN, if nobody has refused it before.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, entropy: Entropy) -> None:
        self.entropy = entropy
        shards = entropy.vocabulary
        self.num_classes = logits.shape[1] if shards is None else shards.size
        self.counted = labels != entropy.ignore_index
        self._is_class = (labels >= 0) & (labels < self.num_classes)
        local = labels if shards is None else labels - shards.start
        is_here = self.counted & (local >= 0) & (local < logits.shape[1])
        self._labels = torch.where(is_here, local, -1)  # in this part of the vocabulary; -1: none
        sums = _kernels(logits).sum_rows(logits, self._labels, entropy)
        self._sums = sums if shards is None else sums.join(shards)
        self._logsumexp = self._sums.maximum + self._sums.exponentials.log()

    def losses(self) -> torch.Tensor:
        """Of every row."""
        entropy, sums, logsumexp = self.entropy, self._sums, self._logsumexp
        smoothing = entropy.label_smoothing
        losses = logsumexp - (1.0 - smoothing) * sums.labelled
        if smoothing:
            losses = losses - smoothing * sums.total / self.num_classes
        if entropy.z_loss:
            losses = losses + entropy.z_loss * logsumexp.square()
        return torch.where(self.counted, torch.where(self._is_class, losses, torch.nan), 0.0)

    def write_gradient(
        self, logits: torch.Tensor, *, out: torch.Tensor | None = None, factor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of the sum of `losses`, times `factor`, in the place of the logits or in `out`."""
        peak = 1.0 + 2.0 * self.entropy.z_loss * self._logsumexp
        kept = self.counted.to(peak.dtype)
        if factor is not None:
            kept = kept * factor
        found = logits if out is None else out
        _kernels(logits).write_gradient(
            logits, found, self._labels, self.entropy, self._logsumexp, peak * kept, kept, self.num_classes
        )
        return found


def _kernels(logits: torch.Tensor) -> type[TorchKernels]:
    if not logits.is_cuda or logits.dtype == torch.float64:
        return TorchKernels
    try:
        from unbounded.activations.tiled import entropy_kernels
    except ImportError:  # a torch without Triton
        return TorchKernels
    return entropy_kernels.TritonKernels
