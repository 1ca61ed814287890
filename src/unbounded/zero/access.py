"""Whole values for the user: full parameters to read and write, and state dicts with unchanged keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unbounded.optim import formats
from unbounded.optim.rules import UpdateRule
from unbounded.zero.engine import Engine
from unbounded.zero.parameter import ManagedParameter
from unbounded.zero.unit import Unit, WeightState


@contextmanager
def full_values(engine: Engine, rules: Mapping[torch.dtype, UpdateRule]) -> Iterator[None]:
    """All ranks of the axis must call this. Every parameter holds its full value; writes are kept. It may be nested."""
    if engine.shown:
        yield
        return
    engine.settle()
    for unit in engine.units:
        engine.gathering.request(unit)
    for unit in engine.units:
        engine.gathering.wait(unit)
        with engine.failures.noting():
            if unit.written is not None:
                unit.written.synchronize()
    engine.raise_failures()
    before = {unit: _open(unit) for unit in engine.units}
    engine.shown = engine.gathering.holding = True
    try:
        yield
    finally:
        engine.shown = engine.gathering.holding = False
        for unit, values in before.items():
            with engine.failures.noting():
                _close(unit, values, rules.get(unit.dtype) if unit.trainable else None)
        if engine.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        engine.settle()
    engine.raise_failures()


def _open(unit: Unit) -> torch.Tensor:
    """Shows a gathered unit's values in its parameters; returns a copy of the owned ones."""
    if unit.reader is not None:
        unit.reader.make_way()
        unit.reader = None
    unit.show_values()
    for parameter in unit.parameters:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    return unit.owned_part().clone()


def _close(unit: Unit, before: torch.Tensor, rule: UpdateRule | None) -> None:
    for parameter in unit.parameters:
        parameter.__class__ = ManagedParameter
    keep_writes(unit, before, rule)
    if not unit.resident:
        unit.hide_values()


def keep_writes(unit: Unit, before: torch.Tensor, rule: UpdateRule | None) -> None:
    """Brings what changed in the gathered buffer to the unit's owned weights and whatever completes them."""
    now = unit.owned_part()
    changed = (_bits(now) != _bits(before)).view(now.numel(), -1).any(dim=1)
    if not bool(changed.any()):
        return
    if not unit.resident:
        unit.weights.evict(now).wait()
    if rule is None:
        return
    fresh = formats.encode_weight(now.float(), unit.dtype, rule)
    for name in ("low", "master"):
        if name in unit.states:
            array = unit.states[name]
            held = torch.empty(array.numel, dtype=array.dtype)
            array.fetch(held).wait()
            held = torch.where(changed.cpu(), fresh[name].cpu(), held)
            array.evict(held).wait()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor`, so that a NaN equals itself; complex numbers of 16 bytes have two."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64))


def attach_state_dict(model: nn.Module, engine: Engine, rules: Mapping[torch.dtype, UpdateRule]) -> list[Any]:
    """Hooks that make `model.state_dict()` give full values on the host, unit by unit, and loading keep them."""
    places: dict[nn.Parameter, tuple[Unit, int]] = {
        parameter: (unit, index) for unit in engine.units for index, parameter in enumerate(unit.parameters)
    }

    def collect(*_: Any) -> None:
        if not engine.collecting:
            engine.recover()
        engine.collecting += 1

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        engine.collecting -= 1
        if engine.collecting:  # the outermost call fills in everything, unit by unit
            return
        wanted: dict[Unit, list[tuple[str, int]]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state and parameter in places:
                unit, index = places[parameter]
                wanted.setdefault(unit, []).append((prefix + name, index))
        for unit in engine.units:
            if unit in wanted:
                values = _whole(engine, unit)
                for key, index in wanted[unit]:
                    state[key] = values[index]
        engine.raise_failures()

    loading: list[Any] = []

    def before_load(*_: Any) -> None:
        loading.append(full_values(engine, rules))
        loading[-1].__enter__()

    def after_load(*_: Any) -> None:
        loading.pop().__exit__(None, None, None)

    hooks = [module.register_state_dict_pre_hook(collect) for module in model.modules()]
    hooks += [module.register_state_dict_post_hook(fill) for module in model.modules()]
    return [
        *hooks,
        model.register_load_state_dict_pre_hook(before_load),
        model.register_load_state_dict_post_hook(after_load),
    ]


def _whole(engine: Engine, unit: Unit) -> list[torch.Tensor]:
    """All ranks of the axis must call this. One host tensor a parameter, the unit released behind them."""
    was_gathered = unit.state is WeightState.GATHERED
    engine.gathering.gather([unit])
    values = [view.detach().to("cpu", copy=True) for view in unit.slot_views(unit.fill)]
    if not was_gathered:
        engine.gathering.release(unit)
    return values
