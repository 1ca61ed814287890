"""How large a model can be: what tiers have left for states, over what its states take a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unbounded.planner.models.footprint import Footprint


@dataclass(frozen=True)
class Capacity:
    """What all ranks together have for states, and what a model like `footprint` fills it with, at stage 3."""

    footprint: Footprint
    device_bytes: float
    other_bytes: float  # of host and disk
    keeps_gradients: bool = True
    may_drop: bool = True  # whether such a job could do without stored gradients
    packs: bool = False  # whether frozen weights outside the device may be packed

    @property
    def left_bytes(self) -> float:
        return self.device_bytes + self.other_bytes

    def states_bytes(self, *, keeps_gradients: bool) -> float:
        """Of the whole model: all of it has weights, what is trained has the rest. What is trained is on the device
        first, so that as many frozen weights as possible are packed."""
        trained, frozen = self._trained_bytes(keeps_gradients), self._frozen_bytes()
        outside = min(frozen, max(0.0, trained + frozen - self.device_bytes))
        return trained + frozen - outside * (1 - self._packed_part())

    def most(self, *, keeps_gradients: bool) -> float:
        """How many parameters fit of a model with such parts, but more or fewer of them."""
        trained, frozen, part = self._trained_bytes(keeps_gradients), self._frozen_bytes(), self._packed_part()
        if not trained + frozen:
            return 0.0
        all_packed = self.left_bytes / (trained + frozen * part)  # as many as that only if none is on the device
        some_packed = (self.device_bytes + self.other_bytes / part) / (trained + frozen)
        return self.footprint.numel * min(all_packed, some_packed)

    def describe(self) -> str:
        """How many fit, also where no gradient is stored."""
        said = self._say(keeps_gradients=self.keeps_gradients)
        if not self.keeps_gradients or not self.may_drop or not self.footprint.trained_numel:
            return said
        return f'{said}; gradients="none": {self._say(keeps_gradients=False)}, one backward per step, no clipping'

    def _say(self, *, keeps_gradients: bool) -> str:
        most = self.most(keeps_gradients=keeps_gradients)
        states = self.states_bytes(keeps_gradients=keeps_gradients) / max(1, self.footprint.numel)
        each = self.left_bytes / most if most else states
        shown = f"{most / 1e12:.3g}T" if most >= 1e12 else f"{most / 1e9:.3g}B"
        return f"{shown} parameters at {each:.3g} bytes each"

    def _trained_bytes(self, keeps_gradients: bool) -> float:
        states = self.footprint.states
        each = states.weights + states.optimizer + states.remainder + (states.gradients if keeps_gradients else 0)
        return self.footprint.trained_numel * each

    def _frozen_bytes(self) -> float:
        return (self.footprint.numel - self.footprint.trained_numel) * self.footprint.states.weights

    def _packed_part(self) -> float:
        states = self.footprint.states
        return states.packed / states.weights if self.packs and states.packed else 1.0


def capacity_of(
    footprint: Footprint,
    room: Mapping[str, float],
    *,
    working: float,
    num_ranks: int,
    keeps_gradients: bool,
    may_drop: bool,
    packs: bool,
    buffers: float = 0.0,
) -> Capacity:
    """What `num_ranks` have of device, host and disk beside working memory and buffers."""
    device = num_ranks * max(0.0, room["device"] - working)
    other = num_ranks * (max(0.0, room["host"] - buffers) + room["disk"])
    return Capacity(footprint, device, other, keeps_gradients, may_drop, packs)
