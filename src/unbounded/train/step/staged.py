"""Runs the batches of a model that is cut into pipeline stages: one call for all parts of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import unbounded
from unbounded.parallel.tensor.head.vocabulary import HeadPart
from unbounded.train.step.objective import MicroBatch, logits_as_cut, sum_losses


class StagedModel:
    """The summed loss of a rank's whole batch. All ranks must call it together."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._factor = model, 1.0
        self._head: HeadPart | None = None
        self._pipeline = unbounded.pipeline(model, self._loss, targets=("targets",), reduction="sum")

    def summed_loss(self, batch: MicroBatch, factor: float = 1.0) -> Tensor:
        """If gradients are enabled, this also runs the backward of `factor` times the loss."""
        self._factor = factor
        given = {"input_ids": batch.inputs, "targets": batch.targets}
        if batch.positions is not None:
            given["position_ids"] = batch.positions
        with logits_as_cut(self._model) as self._head:
            return self._pipeline(**given).double() / factor

    def _loss(self, output: Any, batch: dict[str, Any]) -> Tensor:
        return sum_losses(output, batch["targets"], self._head) * self._factor
