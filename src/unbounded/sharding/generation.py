"""Generation over ranks: transformers' `generate` ends at a different token on each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

MARK = "_is_fsdp_managed_module"
"""What transformers looks for: `generate` then runs on each rank until all are done."""


class _Marked:
    """True for a sharded model; a copy of one is a plain model."""

    def __deepcopy__(self, memo: Any) -> bool:
        return False


def generate_together(model: nn.Module) -> Callable[[], None]:
    """Makes `generate` run equally often on all ranks, which gather weights together; returns what undoes it."""
    marked = [weakref.ref(part) for part in model.modules() if hasattr(part, "generate")]
    for held in marked:
        setattr(held(), MARK, _Marked())

    def undo() -> None:
        for part in filter(None, (held() for held in marked)):
            vars(part).pop(MARK, None)

    return undo
