"""Moves optimizer states between device and host while a model trains, exactly: bytes are copied, nothing else changes.

A unit moves with all of its states and its gradient, between an update and the next use of them. Its weights stay
where they are. States on the device whose weights are on the host are updated by a stream lane, which carries only the
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unbounded.planner.step.streaming import carries_weights
from unbounded.tiers.array import Array, array_bytes
from unbounded.tiers.pool import BufferPool
from unbounded.tiers.tiers import Tiers
from unbounded.zero.engine import Engine
from unbounded.zero.gradients.gradient_value import GradientState
from unbounded.zero.unit import Unit


def _never(unit: Unit) -> bool:
    return False


class Relocation:
    """Moves the states of one model's units. Those that `is_fixed` says must stay: they have a second set on the host,
    or are being read. `bounce` are buffers for arrays that the host cannot address.
    """

    def __init__(
        self, engine: Engine, tiers: Tiers, bounce: BufferPool, is_fixed: Callable[[Unit], bool] = _never
    ) -> None:
        self._engine, self._tiers, self._bounce, self._is_fixed = engine, tiers, bounce, is_fixed

    def units_on(self, tier: str) -> list[Unit]:
        """The units whose states are all on `tier` and may move now, in the order of a forward."""
        units = [unit for unit in self._engine.forward_order() if _may_move(unit, tier)]
        return [unit for unit in units if not self._is_fixed(unit)]

    def move(self, unit: Unit, tier: str) -> None:
        """Moves to "device" or "host". If there is no room, raises, and the unit stays where it was."""
        for handle in (unit.weights_ready, unit.states_written):
            if handle is not None:
                handle.wait()
        unit.make_way()
        with self._tiers.planned_on_host(planned_bytes(unit) * (1 if tier == "host" else -1)):
            states = self._copy(unit, tier)
        is_carried = carries_weights(states=tier, weights=unit.weights.tier)
        for array in unit.move_states(states, streamed=unit.device.type == "cuda" and is_carried).values():
            self._tiers.free(array)
        unit.gradient.store.move(tier, partial(self._tiers.allocate, tier, bounce=self._bounce))

    def _copy(self, unit: Unit, tier: str) -> dict[str, Array]:
        with self._tiers.all_or_none() as states:
            for name, array in unit.states.items():
                assert array.direct is not None
                states[name] = self._tiers.allocate(tier, array.dtype, array.numel, self._bounce, pin=False)
                states[name].evict(array.direct).wait()
        return states


def device_bytes(unit: Unit) -> int:
    """What the unit's states take on the device, with its gradient, which is wide if backwards add up."""
    store = unit.gradient.store
    return _states_bytes(unit) + store.numel * (store.sum_dtype if store.is_wide else store.wire).itemsize


def planned_bytes(unit: Unit) -> int:
    """What a plan counts for them on the host, where room for wide gradients is found when they come."""
    return _states_bytes(unit) + unit.gradient.store.numel * unit.gradient.store.wire.itemsize


def _states_bytes(unit: Unit) -> int:
    return sum(array_bytes(array) for array in unit.states.values())


def _may_move(unit: Unit, tier: str) -> bool:
    is_there = bool(unit.states) and {array.tier for array in unit.states.values()} == {tier}
    return is_there and unit.gradient.tier == tier and unit.gradient.state is GradientState.EMPTY
