"""First values: each unit is filled, broadcast and put on its tiers before the next one is touched.

`install_model` takes the values of a model with real parameters; `zero/setup/meta.py` makes those of a model on the
meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from unbounded.native.bulk import new_tensor
from unbounded.native.disk import ExtentStore
from unbounded.optim import formats
from unbounded.optim.rules import UpdateRule
from unbounded.ranks.axis import Axis
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.pool import BufferPool
from unbounded.tiers.tiers import Tiers
from unbounded.zero.members import Member
from unbounded.zero.unit import Unit

Places = Mapping[str, str]  # "weights", "optimizer", "remainder" -> tier
Entries = Sequence[tuple[Unit, Sequence[Member], Places]]
# What a parameter's optimizer state held before `shard`: state name -> values
Carried = Callable[[nn.Parameter], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class CarriedStates:
    """What an optimizer that has already stepped kept for a unit: whole flat moments, and factors by parameter.

    Step counts and numbers are by the parameters' indices; `count` makes them the unit's.
    """

    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    scalars: dict[int, dict[str, float]] = field(default_factory=dict)

    def encode(self, low: int, high: int, rule: UpdateRule) -> dict[str, torch.Tensor]:
        """The arrays of the moments for a part of the unit."""
        given: dict[str, torch.Tensor] = {}
        for name, value in self.moments.items():
            given |= formats.encode_moment(value[low:high].contiguous(), name, rule)
        return given

    def count(self, unit: Unit) -> None:
        for index, steps in self.steps.items():
            unit.steps[index] = steps
        for index, scalars in self.scalars.items():
            unit.scalars[index] |= scalars


class Installer:
    """Puts the first values of units on their tiers."""

    def __init__(self, tiers: Tiers, ranks: Axis, bounce: BufferPool) -> None:
        self.tiers, self.ranks, self.bounce = tiers, ranks, bounce

    def install(self, unit: Unit, values: torch.Tensor, places: Places, carried: CarriedStates) -> None:
        """All ranks of the axis must call this. `values` is the whole unit, flat; the first rank's are taken."""
        self.ranks.broadcast(values)
        rule = unit.rule
        low, high = unit.owned
        owned = values[low:high]
        narrowed = unit.dtype != values.dtype
        arrays = (
            formats.encode_weight(owned, unit.dtype, rule)
            if narrowed or (rule is not None and values.dtype != torch.float64)
            else {"weight": owned}
        )
        if unit.resident:
            unit.hold_whole()
            self.tiers.count("device", unit.num_bytes)
            unit.buffer.copy_(values)
            unit.owned_part().copy_(arrays["weight"])
            if narrowed and not unit.is_whole:
                self.ranks.gather(unit.buffer, unit.owned_part().clone(), unit.name)
            unit.weights = MemoryArray(unit.owned_part(), "device")
        else:
            unit.weights = self._make_weights(unit, places["weights"])
            unit.weights.evict(arrays["weight"].contiguous()).wait()
        if rule is not None:
            given = {name: value for name, value in arrays.items() if name != "weight"} | carried.encode(
                low, high, rule
            )
            carried.count(unit)
            unit.states = self.make_states(rule, high - low, places, given, pin=unit.streamed)
            self._make_factors(unit, places, carried)

    def _make_weights(self, unit: Unit, tier: str) -> Array:
        numel = unit.owned[1] - unit.owned[0]
        if unit.is_packed:
            return self.tiers.allocate_packed(tier, numel, self.bounce)
        return self.tiers.allocate(tier, unit.dtype, numel, self.bounce)

    def _make_factors(self, unit: Unit, places: Places, carried: CarriedStates) -> None:
        if not unit.factors.held:
            return
        tier = "device" if places["optimizer"] == "device" else "host"
        dtype = torch.promote_types(unit.dtype, torch.float32)
        unit.factors.array = self.tiers.allocate(tier, dtype, unit.factors.numel, self.bounce, pin=False)
        for index, slot in enumerate(unit.layout.slots):
            unit.factors.put(index, carried.factors.get(slot.name, {}))

    def make_states(
        self,
        rule: UpdateRule,
        numel: int,
        places: Places,
        given: Mapping[str, torch.Tensor],
        *,
        pin: bool,
        store: ExtentStore | None = None,
    ) -> dict[str, Array]:
        """The arrays that `rule` keeps for `numel` weights, with the values of `given`; none if one fails."""
        with self.tiers.all_or_none() as states:
            for spec in rule.specs:
                tier = places["remainder"] if spec.name == "remainder" else places["optimizer"]
                # States that only the host's kernel touches need no pinning.
                array = states[spec.name] = self.tiers.allocate(
                    tier, spec.dtype, spec.numel(numel), self.bounce, initial=spec.initial, pin=pin, store=store
                )
                value = given.get(spec.name)
                if value is not None and (spec.initial or bool(value.any())):
                    array.evict(value.contiguous()).wait()
        return states


def install_model(units: Entries, installer: Installer, carried: Carried | None) -> None:
    """All ranks of the axis must call this. Takes the values of a model with real parameters."""
    for unit, members, places in units:
        values = gather_values(
            unit, {member.names[0]: member.parameter for member in members}, members[0].parameter.dtype
        )
        installer.install(unit, values, places, carry_over(unit, unit.rule, carried))


def gather_values(unit: Unit, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    values = new_tensor(unit.layout.numel, dtype, unit.device).zero_()
    for slot, view in zip(unit.layout.slots, unit.slot_views(values), strict=True):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            view.copy_(parameters[slot.name])
    return values


def place_empty(model: nn.Module, device: torch.device, lowered: torch.dtype | None) -> None:
    """Brings parameters without elements, which no unit has, to the device and the dtype of the others."""
    for parameter in model.parameters():
        if parameter.numel() == 0:
            dtype = lowered if lowered is not None and parameter.is_floating_point() else parameter.dtype
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            parameter.grad = None
            if parameter.is_meta:  # a tensor cannot take data of a real device while it is on meta
                torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
            else:
                parameter.data = value


def carry_over(unit: Unit, rule: UpdateRule | None, carried: Carried | None) -> CarriedStates:
    """The states of an optimizer that has already stepped, as `rule` keeps them; none if nothing updates the unit."""
    found = CarriedStates()
    if rule is None or carried is None:
        return found
    names = {spec.name for spec in rule.specs}
    for index, parameter in enumerate(unit.views.parameters):
        # Some optimizers keep counts and running values as plain numbers.
        tensors = {
            name: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in carried(parameter).items()
            if isinstance(value, torch.Tensor | int | float)
        }
        # States on the meta device are first ones, such as Adagrad's sums: the rule fills them in itself.
        held = {name: value for name, value in tensors.items() if not value.is_meta}
        # SGD, Muon and Lion keep no count. Once there are states the next update is not the first, which begins them.
        found.steps[index] = int(held.pop("step", bool(held)))
        shapes = rule.factor_shapes(tuple(parameter.shape))
        for name, value in held.items():
            if name in shapes:
                found.factors.setdefault(unit.layout.slots[index].name, {})[name] = value.view(shapes[name])
            elif name in names:
                dtype = torch.promote_types(unit.dtype, torch.float32)
                zeros = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.device)
                flat = found.moments.setdefault(name, zeros)
                unit.slot_views(flat)[index].copy_(value)
            elif value.numel() == 1:
                found.scalars.setdefault(index, {})[name] = float(value)
    return found
