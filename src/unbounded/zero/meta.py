"""A model on the meta device: made real module by module, unit by unit.

Modules are initialised in the order of the module tree by their own `reset_parameters` (and the model's
`_init_weights`, as in Hugging Face models), and what peft has added by peft. A unit is partitioned as soon as its last
module is done, so that no rank ever holds more of the model than the units that are open.
"""

from __future__ import annotations

import math
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
        self.prefixes = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
        self._blanks: list[_Blank] = []

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
                    self._check_filled({m.names[0]: views.pop(id(m.parameter)) for m in members})
                    installer.install(unit, values.pop(key), places, {})
        self._check_filled({b.name: b.tensor for b in self._blanks if b.is_untouched()})

    def _open(self, unit: Unit, members: Sequence[Member]) -> torch.Tensor:
        """The flat values of a unit, to be filled; what is not, shows."""
        values = torch.zeros(unit.layout.numel, dtype=members[0].parameter.dtype, device=self.device)
        views = unit.slot_views(values)
        for member in members:
            if not self._is_given(member.names[0]):
                views[member.parameter._index].fill_(_no_value(values.dtype))  # type: ignore[attr-defined]
        return values

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
        prefix = self.prefixes[id(module)]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                self._blanks.append(_Blank(prefix + key, module, key, self.device))

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

    def _check_filled(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What nobody has written to would be taken for values: a rotary table that only `__init__` computes."""
        lost = [name for name, tensor in tensors.items() if _is_blank(tensor) and not self._is_given(name)]
        if lost:
            owners = ", ".join(sorted({type(self._owner(name)).__name__ for name in lost}))
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise PlanError(
                f"{shown} (of {owners}) were on the meta device and nothing gave them values. Let the module fill them "
                "in its reset_parameters, or the model in its _init_weights. Buffers may also be kept off the meta "
                "device when the model is built, as accelerate.init_empty_weights() does; transformers 5 needs neither."
            )

    def _is_given(self, name: str) -> bool:
        """Whether the values do not come from the module: peft's are made of others, which one rank alone may have."""
        return self.grafts.is_added(self._owner(name))

    def _owner(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

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


class _Blank:
    """A buffer that was on the meta device, made with values that say that nobody gave it any."""

    def __init__(self, name: str, module: nn.Module, key: str, device: torch.device) -> None:
        self.name, self._module, self._key = name, module, key
        meta = module._buffers[key]
        assert meta is not None
        self.tensor = module._buffers[key] = torch.full_like(meta, _no_value(meta.dtype), device=device)
        self._version = self.tensor._version

    def is_untouched(self) -> bool:
        """Neither replaced nor written to. Writing through `.data` is not counted: the values must be asked as well."""
        return self._module._buffers.get(self._key) is self.tensor and self.tensor._version == self._version


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but what says that nobody gave it values. Its first element mostly tells."""
    if tensor.numel() == 0:
        return False
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    parts = (tensor.flatten()[:1], tensor)
    return all(bool((part.isnan() if is_number else part == _no_value(part.dtype)).all()) for part in parts)


def _no_value(dtype: torch.dtype) -> float | int | bool:
    """What no module fills a tensor with."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    if dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


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
