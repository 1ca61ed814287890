"""How large a model can be: what tiers have left for states, over what its states take a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unbounded.planner.models.footprint import Footprint


@dataclass(frozen=True)
class Capacity:
    """What all ranks together have for states, and what a model like `footprint` fills it with, at stage 3."""

    footprint: Footprint
    left_bytes: float
    keeps_gradients: bool = True

    def states_bytes(self, *, keeps_gradients: bool) -> float:
        """Of the whole model: all of it has weights, what is trained has the rest."""
        states = self.footprint.states
        trained = states.optimizer + states.remainder + (states.gradients if keeps_gradients else 0)
        return self.footprint.numel * states.weights + self.footprint.trained_numel * trained

    def most(self, *, keeps_gradients: bool) -> float:
        """How many parameters fit of a model with such parts, but more or fewer of them."""
        states = self.states_bytes(keeps_gradients=keeps_gradients)
        return self.footprint.numel * max(0.0, self.left_bytes) / states if states else 0.0

    def describe(self) -> str:
        """How many fit, also where no gradient is stored."""
        said = self._say(keeps_gradients=self.keeps_gradients)
        if not self.keeps_gradients or not self.footprint.trained_numel:
            return said
        return f'{said}; gradients="none": {self._say(keeps_gradients=False)}, one backward per step, no clipping'

    def _say(self, *, keeps_gradients: bool) -> str:
        each = self.states_bytes(keeps_gradients=keeps_gradients) / max(1, self.footprint.numel)
        most = self.most(keeps_gradients=keeps_gradients)
        shown = f"{most / 1e12:.3g}T" if most >= 1e12 else f"{most / 1e9:.3g}B"
        return f"{shown} parameters at {each:.3g} bytes each"


def left_for_states(room: Mapping[str, float], *, working: float, buffers: float, num_ranks: int) -> float:
    """What `num_ranks` have of device, host and disk beside working memory and buffers."""
    return num_ranks * (room["device"] - working + max(0.0, room["host"] - buffers) + room["disk"])
