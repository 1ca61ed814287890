"""First values of a model, module by module, unit by unit: for models on the meta device, or with values from files.

Modules are filled in the order of the module tree: from files if those have values (`GivenValues`), otherwise by their
own `reset_parameters` (and the `_init_weights` of the model they are in, as in Hugging Face models). What another
library has added to the model's own modules (`Additions`: adapters) is filled by that library's own rules. A unit is
partitioned as soon as its last module is done, so no rank ever holds more of the model than the open units.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.native.bulk import new_tensor
from unbounded.ranks.cut import Cut
from unbounded.zero.members import Member
from unbounded.zero.setup.initial import Carried, Entries, Installer, carry_over, gather_values
from unbounded.zero.setup.reach import Reaches, absent_shown, find_reaches, in_order
from unbounded.zero.setup.tile_steps import is_hidden, rows_of, with_tiles
from unbounded.zero.unit import Unit


class Additions(Protocol):
    """What another library has added to a model. A *graft* is what was added around one module, with that module."""

    base: nn.Module  # the model's own, inside what was added

    def is_added(self, module: nn.Module) -> bool: ...

    def is_grafted(self, module: nn.Module) -> bool:
        """Whether it belongs to a graft, so that `fill` gives it its values."""
        ...

    def steps(self) -> Iterator[tuple[nn.Module | None, list[nn.Module]]]:
        """All modules in the order of the tree: one at a time, or a graft with all of its modules together."""
        ...

    def check(self) -> None:
        """Raises if `fill` could not work."""
        ...

    def fill(self, root: nn.Module) -> None:
        """Gives what was added to this graft its first values; its modules hold values that can be written to."""
        ...


class GivenValues(Protocol):
    """Values from elsewhere, by the model's names."""

    def has(self, name: str) -> bool: ...

    def read(
        self,
        name: str,
        target: torch.Tensor,
        *,
        is_buffer: bool,
        rows: tuple[int, int] | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Fills `target`, if this rank is the one that does; every rank keeps its own buffers.

        With `rows`, it is those rows of the named tensor. For a parameter that the tensor axis cuts, only this rank's
        part has to be filled.
        """
        ...

    def unable(self, module: str, lacking: str) -> Exception:
        """The error for a module that has neither given values nor a way to make them."""
        ...


class ModuleFill:
    """Fills a model's modules. With `is_meta` its parameters have no values yet; otherwise some are replaced."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        additions: Additions,
        *,
        given: GivenValues | None = None,
        is_meta: bool = True,
        cuts: Mapping[int, Cut] | None = None,
        absent: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        carried: Carried | None = None,
    ) -> None:
        self.cuts = cuts or {}
        self.absent = absent or {}  # the parameters of other stages, by module: their random numbers are drawn here too
        self.model, self.device, self.additions, self.given, self.is_meta = model, device, additions, given, is_meta
        self.carried = carried
        self._initialisers = _find_initialisers(model)
        self._prefixes = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
        self._blanks: list[_Blank] = []
        self._shown_cuts: dict[int, Cut] = {}

    def install(self, units: Entries, installer: Installer) -> None:
        """All ranks of the axis must call this."""
        home = {id(member.parameter): entry for entry in units for member in entry[1]}
        waiting = {id(unit): {id(m) for member in members for m, _ in member.holders} for unit, members, _ in units}
        values: dict[int, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        reaches = self._find_reaches()
        for key, reached in reaches.items():
            for parameter in (p for module in reached for p in module._parameters.values() if id(p) in home):
                waiting[id(home[id(parameter)][0])].add(key)
        for graft, modules in with_tiles(in_order(self.additions.steps(), reaches), self._prefixes):
            reached = [below for module in modules for below in reaches.get(id(module), ()) if below not in modules]
            own = [p for module in (*modules, *reached) for p in module._parameters.values() if id(p) in home]
            touched = {id(home[id(p)][0]): home[id(p)] for p in own}
            for key, (unit, members, _) in touched.items():
                if key not in values:
                    values[key] = self._open(unit, members)
                    slots = unit.slot_views(values[key])
                    views |= {id(m.parameter): slots[m.parameter._index] for m in members}  # type: ignore[attr-defined]
            with shown([*modules, *reached], views, self.cuts) as self._shown_cuts:
                with absent_shown(reached, self.absent, self.device):
                    self._fill_step(graft, modules)
                for module in reached:
                    self._read(module)
            for key, (unit, members, places) in touched.items():
                waiting[key].difference_update(id(module) for module in modules)
                if not waiting[key]:
                    self._check_filled({m.names[0]: views.pop(id(m.parameter)) for m in members})
                    states = carry_over(unit, unit.rule, self.carried)
                    installer.install(unit, values.pop(key), places, states)
        self._check_filled({b.name: b.tensor for b in self._blanks if b.is_untouched()})

    def check(self) -> None:
        """Raises if a module has something without values and no way to get them."""
        if self.is_meta:
            self.additions.check()
        for name, module in self.model.named_modules():
            lacking = self._lacking(module)
            resets = _reset_method(module) is not None
            if lacking and not resets and (self.additions.is_added(module) or id(module) not in self._initialisers):
                raise self._unable(f"the module {name or 'model'!r} ({type(module).__name__})", ", ".join(lacking))

    def _open(self, unit: Unit, members: Sequence[Member]) -> torch.Tensor:
        """The flat values of a unit, to be filled; what is not filled shows."""
        dtype = members[0].parameter.dtype
        if not self.is_meta:
            return gather_values(unit, {member.names[0]: member.parameter for member in members}, dtype)
        values = new_tensor(unit.layout.numel, dtype, self.device).zero_()
        views = unit.slot_views(values)
        for member in members:
            if not self._comes_from_elsewhere(member.names[0]):
                views[member.parameter._index].fill_(_no_value(dtype))  # type: ignore[attr-defined]
        return values

    def _fill_step(self, graft: nn.Module | None, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            if graft is None or not self.additions.is_added(module):
                self._fill(module)
        if graft is not None:
            if self.is_meta:
                self.additions.fill(graft)
            for module in modules:
                if self.additions.is_grafted(module):
                    self._read(module)

    def _fill(self, module: nn.Module) -> None:
        """First values for a module's own parameters and buffers, which can be written to."""
        if id(module) in self.absent:
            self._draw_absent(module)
            return
        lacking = self._lacking(module)
        self._materialise_buffers(module)
        if lacking or self.given is None:
            self._reset(module)
        self._read(module)

    def _find_reaches(self) -> Reaches:
        """The modules below each one to which its own initialisation also gives values."""
        if not self.is_meta:
            return {}
        return find_reaches(
            self.model, self.absent, self._reset, lambda m: self.given is None or bool(self._lacking(m))
        )

    def _draw_absent(self, module: nn.Module) -> None:
        """Initialises what another stage holds, only to advance the random state."""
        self._materialise_buffers(module)
        if self.given is not None or not self.is_meta:
            return
        with absent_shown([module], self.absent, self.device):
            self._reset(module)

    def _materialise_buffers(self, module: nn.Module) -> None:
        prefix = self._prefixes[id(module)]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                self._blanks.append(_Blank(prefix + key, module, key, self.device))

    def _reset(self, module: nn.Module) -> None:
        """Runs the module's own initialisation."""
        reset = _reset_method(module)
        if reset is not None:
            reset()
        initialise = self._initialisers.get(id(module))
        if initialise is not None and not self.additions.is_added(module):
            with torch.no_grad():
                initialise(module)

    def _read(self, module: nn.Module) -> None:
        """Takes the given values of a module's own parameters and buffers."""
        if self.given is None:
            return
        prefix = self._prefixes[id(module)]
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and self.given.has(prefix + key) and not is_hidden(tensor):
                is_buffer, cut = key in module._buffers, self._shown_cuts.get(id(tensor))
                self.given.read(prefix + key, tensor, is_buffer=is_buffer, rows=rows_of(module), cut=cut)

    def _check_filled(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuses what nobody has written to but would look like values: a rotary table that only `__init__` makes."""
        lost = [n for n, tensor in tensors.items() if _is_blank(tensor) and not self._comes_from_elsewhere(n)]
        if lost:
            owners = ", ".join(sorted({type(self._owner(name)).__name__ for name in lost}))
            named = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise PlanError(
                f"{named} (of {owners}) were on the meta device, and nothing gave them values. Let the module fill "
                "them in its reset_parameters, or the model in its _init_weights. Buffers may also be kept off the "
                "meta device when the model is built, as accelerate.init_empty_weights() does."
            )

    def _comes_from_elsewhere(self, name: str) -> bool:
        """Whether the values do not come from the module itself; only one rank may have them until the broadcast."""
        return self._is_given(name) or self.additions.is_added(self._owner(name))

    def _is_given(self, name: str) -> bool:
        return self.given is not None and self.given.has(name)

    def _owner(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _lacking(self, module: nn.Module) -> list[str]:
        """What a module must initialise itself: its tensors that have no values and are not given."""
        if self.additions.is_grafted(module):
            return []
        keys = [key for key, p in module._parameters.items() if p is not None and p.numel() and self.is_meta]
        keys += [key for key, b in module._buffers.items() if b is not None and b.is_meta and b.numel()]
        return [key for key in keys if not self._is_given(self._prefixes[id(module)] + key)]

    def _unable(self, module: str, lacking: str) -> Exception:
        if self.given is not None:
            return self.given.unable(module, lacking)
        return PlanError(
            f"{module} has {lacking} on the meta device and no reset_parameters method to initialise them. "
            "Give it one, or pass weights=folder."
        )


class _Blank:
    """A buffer that was on the meta device, made with a marker value that shows if nobody fills it."""

    def __init__(self, name: str, module: nn.Module, key: str, device: torch.device) -> None:
        self.name, self._module, self._key = name, module, key
        meta = module._buffers[key]
        assert meta is not None
        self.tensor = module._buffers[key] = torch.full_like(meta, _no_value(meta.dtype), device=device)
        self._version = self.tensor._version

    def is_untouched(self) -> bool:
        """Neither replaced nor written to. Writes through `.data` are not counted, so the values are checked too."""
        return self._module._buffers.get(self._key) is self.tensor and self.tensor._version == self._version


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds only the marker value. Its first element usually decides."""
    if tensor.numel() == 0:
        return False
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    parts = (tensor.flatten()[:1], tensor)
    return all(bool((part.isnan() if is_number else part == _no_value(part.dtype)).all()) for part in parts)


def _no_value(dtype: torch.dtype) -> float | int | bool:
    """A marker value that no module fills a tensor with."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    if dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


@contextmanager
def shown(
    modules: Sequence[nn.Module], views: Mapping[int, torch.Tensor], cuts: Mapping[int, Cut] | None = None
) -> Iterator[dict[int, Cut]]:
    """Inside, modules hold these tensors in place of their parameters; writes stay in them.

    A parameter that the tensor axis cuts is shown whole, so that it gets the values of the one-rank model; this rank's
    part is kept. Gives the cuts of such tensors, by id.
    """
    managed = [(module, dict(module._parameters)) for module in modules]
    placed: list[tuple[nn.Parameter, torch.Tensor, Cut | None]] = []
    whole: dict[int, torch.Tensor] = {}
    for module, own in managed:
        for key, parameter in own.items():
            if parameter is not None and id(parameter) in views:
                view, cut = views[id(parameter)], (cuts or {}).get(id(parameter))
                if cut is not None and id(parameter) not in whole:
                    whole[id(parameter)] = torch.full(
                        cut.shape, _no_value(view.dtype), dtype=view.dtype, device=view.device
                    )
                    cut.put(whole[id(parameter)], view)
                value = nn.Parameter(whole.get(id(parameter), view), requires_grad=parameter.requires_grad)
                module._parameters[key] = value
                placed.append((value, view, cut))
    try:
        yield {id(value): cut for value, _, cut in placed if cut is not None}
    finally:
        for module, own in managed:
            module._parameters.update(own)
    for value, view, cut in placed:
        if cut is not None:
            view.copy_(cut.take(value.detach()))
        elif value.data_ptr() != view.data_ptr():  # given other data instead of being written to
            view.copy_(value.detach())


def _find_initialisers(
    module: nn.Module, outer: Callable[[nn.Module], object] | None = None
) -> dict[int, Callable[[nn.Module], object]]:
    """The `_init_weights` of the innermost model around each module that has one, by the module's id."""
    own = getattr(module, "_init_weights", None)
    initialise = own if callable(own) and _takes_module(own) else outer
    found = {id(module): initialise} if initialise is not None else {}
    for child in module.children():
        found = _find_initialisers(child, initialise) | found
    return found


def _takes_module(method: Callable[..., object]) -> bool:
    """Whether it initialises the module that it is given; some modules have a method of that name for themselves."""
    parameters = inspect.signature(method).parameters.values()
    return len([one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]) == 1


def _reset_method(module: nn.Module) -> Callable[[], None] | None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None
