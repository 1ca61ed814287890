"""The few parts of SVG that the charts need: elements, scales, and marks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """One element; `class_` and `stroke_width` stand for names that Python does not allow."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_show(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def text(words: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escape(words), x=x, y=y, **attributes)


def titled(shape: str, tooltip: str) -> str:
    """The shape with its tooltip."""
    return f"<g><title>{escape(tooltip)}</title>{shape}</g>"


@dataclass(frozen=True)
class Scale:
    """Maps numbers in [low, high] to [start, end] of the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def round_marks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def finite_range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest number, moved apart a little if they are equal."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    return (low, high) if high > low else (low - abs(low) * 0.05 - 1e-12, high + abs(high) * 0.05 + 1e-12)


def _show(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
