"""A model on the meta device: made real module by module, unit by unit.

Modules are initialised in the order of the module tree by their own `reset_parameters` (and the model's
`_init_weights`, as in Hugging Face models), and what peft has added by peft. A unit is partitioned as soon as its last
module is done, so that no rank ever holds more of the model than the units that are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.zero.adapters import Grafts
from unbounded.zero.initial import Entries, Installer
from unbounded.zero.unit import Unit
from unbounded.zero.units import Member


class MetaModel:
    """A model on the meta device, initialised in the order of its module tree."""

    is_meta = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.grafts = Grafts(model)
        self._init_weights = getattr(self.grafts.base, "_init_weights", None)

    def install(self, units: Entries, installer: Installer) -> None:
        """All ranks of the axis must call this."""
        home = {id(member.parameter): entry for entry in units for member in entry[1]}
        waiting = {id(unit): {id(m) for member in members for m, _ in member.holders} for unit, members, _ in units}
        values: dict[int, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        for graft, modules in self.grafts.steps():
            own = [p for module in modules for p in module._parameters.values() if id(p) in home]
            touched = {id(home[id(p)][0]): home[id(p)] for p in own}
            for key, (unit, members, _) in touched.items():
                if key not in values:
                    values[key] = self._open(unit, members)
                    slots = unit.slot_views(values[key])
                    views |= {id(m.parameter): slots[m.parameter._index] for m in members}  # type: ignore[attr-defined]
            with shown(modules, views):
                self._fill_step(graft, modules)
            for key, (unit, members, places) in touched.items():
                waiting[key].difference_update(id(module) for module in modules)
                if not waiting[key]:
                    for member in members:
                        del views[id(member.parameter)]
                    installer.install(unit, values.pop(key), places, {})

    def _open(self, unit: Unit, members: Sequence[Member]) -> torch.Tensor:
        """The flat values of a unit, to be filled."""
        return torch.zeros(unit.layout.numel, dtype=members[0].parameter.dtype, device=self.device)

    def _fill_step(self, graft: nn.Module | None, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            if graft is None or not self.grafts.is_added(module):
                self._fill(module)
        if graft is not None and self.is_meta:
            self.grafts.fill(graft)

    def _fill(self, module: nn.Module) -> None:
        """First values for a module's own parameters and buffers, which can be written to."""
        self._materialise_buffers(module)
        self._reset(module)

    def _materialise_buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self.device)

    def _reset(self, module: nn.Module) -> None:
        """Runs the module's own initialisation."""
        reset = _reset_method(module)
        if reset is not None:
            reset()
        if callable(self._init_weights) and not self.grafts.is_added(module):
            with torch.no_grad():
                self._init_weights(module)

    def check(self) -> None:
        """Every module that `_lacking` names something of must know how to initialise it."""
        if self.is_meta:
            self.grafts.check()
        for name, module in self.model.named_modules():
            lacking = self._lacking(name, module)
            resets = _reset_method(module) is not None
            if lacking and not resets and (self.grafts.is_added(module) or not callable(self._init_weights)):
                raise self._unable(f"the module {name or 'model'!r} ({type(module).__name__})", ", ".join(lacking))

    def _lacking(self, path: str, module: nn.Module) -> list[str]:
        """What a module must initialise itself: its own parameters and buffers on the meta device."""
        if self.grafts.is_grafted(module):
            return []
        own = [*module._parameters.items(), *module._buffers.items()]
        return [key for key, value in own if value is not None and value.is_meta and value.numel()]

    def _unable(self, module: str, lacking: str) -> Exception:
        return PlanError(
            f"{module} has {lacking} on the meta device and no reset_parameters method to initialise them. "
            "Give it one, or pass weights=folder."
        )


@contextmanager
def shown(modules: Sequence[nn.Module], views: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, modules hold these tensors in place of their parameters; what is written is kept in them."""
    managed = [(module, dict(module._parameters)) for module in modules]
    placed: list[tuple[nn.Parameter, torch.Tensor]] = []
    for module, own in managed:
        for key, parameter in own.items():
            if parameter is not None and id(parameter) in views:
                value = nn.Parameter(views[id(parameter)], requires_grad=parameter.requires_grad)
                module._parameters[key] = value
                placed.append((value, views[id(parameter)]))
    try:
        yield
    finally:
        for module, own in managed:
            module._parameters.update(own)
    for value, view in placed:
        if value.data_ptr() != view.data_ptr():  # given other data instead of being written to
            view.copy_(value.detach())


def _reset_method(module: nn.Module) -> Callable[[], None] | None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None
