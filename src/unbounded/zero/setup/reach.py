"""Initialisations that reach below their own module: GPT-2's feed-forward scales the weight of its last layer, an
`nn.MultiheadAttention` clears the bias of its output. What each one reaches is found by a run on the meta device, which
costs neither memory nor random numbers, so that the real one gets only those parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Step = tuple[nn.Module | None, list[nn.Module]]
Absent = Mapping[int, Mapping[str, torch.Tensor]]
Reaches = dict[int, list[nn.Module]]


def find_reaches(
    model: nn.Module, absent: Absent, initialise: Callable[[nn.Module], None], wanted: Callable[[nn.Module], bool]
) -> Reaches:
    """The modules below each one whose parameters its own initialisation uses, by its id.

    `absent` are parameters that modules do not hold here, such as those of other stages.
    """
    found: Reaches = {}
    with _on_meta(model, absent) as holders:
        for module in model.modules():
            if next(module.children(), None) is None or not wanted(module):
                continue
            seen = _UsedTensors()
            with suppress(Exception), seen:  # what fails on the meta device runs later for real, or raises there
                initialise(module)
            own = {id(parameter) for parameter in module._parameters.values()}
            reached = {id(holders[key]): holders[key] for key in seen.tensors if key in holders and key not in own}
            if reached:
                found[id(module)] = list(reached.values())
    return found


def in_order(steps: Iterable[Step], reaches: Reaches) -> list[Step]:
    """The steps, with each module that reaches below itself after everything below it, as in constructors."""
    listed = list(steps)
    place = {id(module): index for index, (_, modules) in enumerate(listed) for module in modules}

    def key(index: int) -> tuple[int, int, int]:
        reaching = [module for module in listed[index][1] if id(module) in reaches]
        last = max((place[id(m)] for module in reaching for m in module.modules() if id(m) in place), default=index)
        return (last, 1, -index) if last > index else (index, 0, 0)

    return [listed[index] for index in sorted(range(len(listed)), key=key)]


@contextmanager
def absent_shown(modules: Iterable[nn.Module], absent: Absent, device: torch.device | str) -> Iterator[None]:
    """Inside, these modules hold blanks in place of parameters that are not here."""
    lacking = [(module, absent[id(module)]) for module in modules if id(module) in absent]
    for module, parameters in lacking:
        for name, parameter in parameters.items():
            blank = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module._parameters[name] = nn.Parameter(blank, requires_grad=False)
    try:
        yield
    finally:
        for module, parameters in lacking:
            module._parameters.update(dict.fromkeys(parameters))


@contextmanager
def _on_meta(model: nn.Module, absent: Absent) -> Iterator[dict[int, nn.Module]]:
    """Inside, modules hold new parameters on the meta device; gives the holder of each, by its id."""
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    made: dict[int, nn.Parameter] = {}
    holders: dict[int, nn.Module] = {}
    with absent_shown([module for module, _, _ in held], absent, "meta"):
        try:
            for module, own, _ in held:
                for name, parameter in own.items():
                    if parameter is not None and id(parameter) not in made:
                        blank = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                        made[id(parameter)] = nn.Parameter(blank, requires_grad=False)
                    if parameter is not None:
                        module._parameters[name] = made[id(parameter)]
                for parameter in module._parameters.values():
                    holders.setdefault(id(parameter), module)
            yield holders
        finally:
            for module, own, buffers in held:
                module._parameters.update(own)
                module._buffers.update(buffers)


class _UsedTensors(TorchFunctionMode):
    """Notes by id the tensors that functions get."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.tensors += [id(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return func(*args, **kwargs)
