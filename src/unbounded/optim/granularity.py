"""What an update must see at once to change one element. Layouts, pieces and ranks never split it."""

from __future__ import annotations

from enum import Enum


class Granularity(Enum):
    ELEMENT = "element"
    BLOCK = "block"  # the compact format: elements that share a scale
    TENSOR = "tensor"  # the whole parameter: orthogonalised, factored, or scaled by its norm
