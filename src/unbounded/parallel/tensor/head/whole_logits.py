"""Logits of all classes in the output of a training forward whose loss was computed from parts of them.

Most training loops never look at them, so they are joined when somebody does: for an accuracy, an entropy, a second
loss. Only their shape, dtype and device are known before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unbounded.deferred_tensor import DeferredTensor


class WholeLogits(DeferredTensor):
    """All ranks of the axis must look at it alike. `join` makes all classes from a rank's `part`, in the graph."""

    _join: Callable[[], torch.Tensor]
    _made: torch.Tensor | None

    @staticmethod
    def __new__(  # type: ignore[misc]
        cls: type[WholeLogits], part: torch.Tensor, num_classes: int, join: Callable[[], torch.Tensor]
    ) -> WholeLogits:
        whole = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (*part.shape[:-1], num_classes), dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        whole._join, whole._made = join, None
        return whole

    def make(self) -> torch.Tensor:
        """The logits of all classes."""
        if self._made is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._made = self._join()
        return self._made
