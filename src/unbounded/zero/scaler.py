"""Dynamic loss scaling for fp16: pure arithmetic on a frozen state, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """The scale and how long it has held. It halves on overflow and doubles after `growth_interval` good steps."""

    value: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def after_step(self, *, overflow: bool) -> LossScale:
        if overflow:
            return replace(self, value=max(self.value / 2, self.minimum), good_steps=0)
        if self.good_steps + 1 >= self.growth_interval:
            return replace(self, value=min(self.value * 2, self.maximum), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
