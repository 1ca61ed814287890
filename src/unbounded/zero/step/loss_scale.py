"""Dynamic loss scaling for fp16: pure arithmetic on a frozen state, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unbounded.planner.plan import Plan


@dataclass(frozen=True)
class LossScale:
    """The scale and how long it has held. It halves on overflow and doubles after `growth_interval` good steps.

    With a `hysteresis` of 2 the first overflow only skips its step, and so does the first one after the scale has
    doubled again. A `growth_interval` of 0 keeps the scale as it is.
    """

    value: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24
    hysteresis: int = 1
    endured: int = 0  # overflows that did not halve it since it last doubled

    @classmethod
    def of_plan(cls, plan: Plan) -> LossScale | None:
        """The scale that training begins with; None if the precision needs none."""
        if plan.precision != "fp16":
            return None
        return cls(
            value=plan.loss_scale,
            growth_interval=plan.loss_scale_window,
            minimum=min(plan.loss_scale_minimum, plan.loss_scale),
            maximum=max(plan.loss_scale, cls.maximum),
            hysteresis=plan.loss_scale_hysteresis,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the loss is never scaled."""
        return self.value == 1.0 and self.growth_interval == 0

    @property
    def is_exhausted(self) -> bool:
        """Whether an overflow would skip its step and leave nothing to try: the scale is as low as it may be."""
        return self.growth_interval > 0 and self.value <= self.minimum and self.endured + 1 >= self.hysteresis

    def after_step(self, *, overflow: bool) -> LossScale:
        if self.growth_interval == 0:
            return self
        if overflow and self.endured + 1 < self.hysteresis:
            return replace(self, good_steps=0, endured=self.endured + 1)
        if overflow:
            return replace(self, value=max(self.value / 2, self.minimum), good_steps=0)
        if self.good_steps + 1 >= self.growth_interval:
            return replace(self, value=min(self.value * 2, self.maximum), good_steps=0, endured=0)
        return replace(self, good_steps=self.good_steps + 1)
