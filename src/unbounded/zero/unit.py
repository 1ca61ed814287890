"""A unit at run time: parameters that move together in one flat buffer.

The flat buffer keeps its identity for life; only the bytes under it come and go, so tensors that autograd
saved, compiled blocks and tied weights stay valid.

    RELEASED --request--> FETCHING --wait--> GATHERED --release--> RELEASED

A *resident* unit (weights whole on the device) is never released; an update only makes it FETCHING until its
new weights are in place. Inside a forward the modules hold views of the flat buffer that come out of one
autograd node a unit (`_Views`), whose backward receives all gradients of the unit in one call.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from unbounded.errors import StateError
from unbounded.tiers.array import Array
from unbounded.tiers.lane import Handle
from unbounded.tiers.reader import Reader
from unbounded.zero.gradient import Gradient
from unbounded.zero.layout import Layout, find_runs
from unbounded.zero.parameter import ManagedParameter, hide, manage, show
from unbounded.zero.units import Member

_OWN = {"_unit", "_index"}
_version = operator.attrgetter("_version")
_unflatten = torch._C._nn.unflatten_dense_tensors  # one call makes the views of a whole unit


class WeightState(Enum):
    RELEASED = "released"
    FETCHING = "fetching"
    GATHERED = "gathered"


class Keeper(Protocol):
    """The engine as a unit sees it."""

    collecting: int  # state dicts being put together

    def borrow(self, unit: Unit, *, counted: bool) -> bool: ...

    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None: ...


class Unit:
    """See the module's docstring. `owned` is the part of the flat buffer whose states this rank keeps."""

    def __init__(
        self, name: str, members: Sequence[Member], layout: Layout, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name, self.layout, self.dtype, self.device = name, layout, dtype, device
        by_name = {member.names[0]: member for member in members}
        ordered = [by_name[slot.name] for slot in layout.slots]
        self.trainable = ordered[0].parameter.requires_grad
        self.numel = sum(slot.numel for slot in layout.slots)
        self.storage = torch.UntypedStorage(0, device=device)
        # Aliases with version counters of their own: filling the buffer is not a change that autograd should see.
        self.fill = _alias(self.storage, dtype, layout.numel)
        self._flat = _alias(self.storage, dtype, layout.numel)
        self._templates, picks = _templates(layout)
        places = [(m._parameters, attribute, i) for i, member in enumerate(ordered) for m, attribute in member.holders]
        self._dicts = [place[0] for place in places]
        self._attributes = [place[1] for place in places]
        self._pick = [picks[place[2]] for place in places]
        self._slot_pick = picks
        self.parameters = [manage(member.parameter, self, i) for i, member in enumerate(ordered)]
        self._placeholders = [self.parameters[place[2]] for place in places]
        # What users keep on their parameters is there inside forwards too.
        self._kept_on = [(picks[i], vars(p)) for i, p in enumerate(self.parameters) if vars(p).keys() - _OWN]

        self.group_runs = find_runs(layout, [slot.group for slot in layout.slots])

        self.state = WeightState.RELEASED
        self.resident = False
        self.streamed = False  # states on the host, updated by the GPU
        self.claims = 0  # visits, past and expected, that want it gathered
        self.late = False  # its backward was left before its gradient came
        self.handle: Handle | None = None  # the fetch in flight
        self.update: Handle | None = None  # the optimizer's update in flight: done when the new weights are home
        self.written: Handle | None = None  # and when the new states are
        self.reader: Reader | None = None  # a save that still reads the owned states: updates wait for it
        self.owned = (0, layout.numel)
        self.weights: Array
        self.states: dict[str, Array] = {}
        self.gradient: Gradient
        self.steps = np.zeros(len(layout.slots), dtype=np.int64)  # updates each parameter has had
        self.scalars: list[dict[str, float]] = [{} for _ in layout.slots]
        self.used = bytearray(len(layout.slots))  # which parameters have a gradient
        self.unreduced: torch.Tensor | None = None  # whole local gradients waiting for a reduction
        self.swapped = False  # the modules hold views now
        self.frozen: set[int] = set()  # parameters that were frozen after `shard`: their gradients are left out
        self._pass_views: Sequence[torch.Tensor] | None = None  # views in the graph of the pass under way
        self._plain_views: Sequence[torch.Tensor] | None = None
        self._swapped_in: Sequence[torch.Tensor] = ()  # what the modules hold in the forward under way
        self.calls = 0  # forwards since the last step
        self.fires = 0  # backwards since the last step
        self.keeper: Keeper

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps the states of all of it."""
        return self.owned == (0, self.layout.numel)

    @property
    def is_all_there_is(self) -> bool:
        """Whether the gathered buffer is the weights themselves, which nothing completes and no rank has a copy of."""
        return self.resident and self.is_whole and not {"low", "master"} & self.states.keys()

    @property
    def num_bytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    # -- bytes ---------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        if self.storage.nbytes() != self.num_bytes:
            self.storage.resize_(self.num_bytes)

    def deallocate(self) -> None:
        self.storage.resize_(0)

    def owned_part(self) -> torch.Tensor:
        """This rank's part of the gathered buffer."""
        return self.fill[self.owned[0] : self.owned[1]]

    def slot_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat`, of the layout's length, as one view a parameter."""
        return list(map(_unflatten(flat, self._templates).__getitem__, self._slot_pick))

    def forget_update(self) -> None:
        """The states were replaced from outside: what became of the last update no longer matters."""
        self.update = self.written = None

    # -- what modules and users see ------------------------------------------------------------------------------

    def views(self) -> Sequence[torch.Tensor]:
        """Views of the gathered buffer: new ones in the graph where gradients are wanted, plain ones else."""
        if self.trainable and torch.is_grad_enabled():
            self._pass_views = _Views.apply(_anchor(self.device), self)
            assert self._pass_views is not None
            return self._pass_views
        if torch.is_inference_mode_enabled():  # such views could not be saved for a backward later
            return _unflatten(self._flat, self._templates)
        if self._plain_views is None:
            self._plain_views = _cut(self._flat, self._templates)
            for view in self._plain_views:  # what registers them anew inside a forward must take them for parameters
                view._is_param = True  # type: ignore[attr-defined]
        return self._plain_views

    def forget_views(self) -> None:
        """The pass is over: the next one makes new nodes in its own graph."""
        self._pass_views = None

    def swap_in(self) -> None:
        """Puts views of the gathered buffer into the modules."""
        if not self.swapped and not all(map(operator.is_, self._held(), self._placeholders)):
            self._report_replaced()
        self.swapped = True
        views = self._swapped_in = self.views()
        for index, kept in self._kept_on:
            vars(views[index]).update({name: value for name, value in kept.items() if name not in _OWN})
        _put(self._dicts, self._attributes, map(views.__getitem__, self._pick))

    def swap_out(self) -> None:
        """Puts the managed parameters back into the modules."""
        if self.swapped:
            self.swapped = False
            _put(self._dicts, self._attributes, self._placeholders)

    def refuse_writes(self) -> None:
        """Raises where a forward has changed a weight in place: the change would be lost with the gathered buffer."""
        views, self._swapped_in = self._swapped_in, ()
        if self.resident or torch.is_inference_mode_enabled() or not any(map(_version, views)):
            return
        self._plain_views = None  # with new counters
        kept = torch.empty(self.weights.numel, dtype=self.dtype, device=self.device)
        self.weights.fetch(kept).wait()
        if torch.equal(kept.view(torch.uint8), self.owned_part().view(torch.uint8)):
            return
        changed = [slot.name for slot, i in zip(self.layout.slots, self._slot_pick, strict=True) if views[i]._version]
        raise StateError(
            f"the forward has changed the parameter {changed[0]!r} in place, which would be lost: it is kept on "
            f"{self.weights.tier} and read anew for every pass. Change it between steps, inside "
            "`with unbounded.full_params(model):`."
        )

    def _held(self) -> Iterator[Any]:
        return map(dict.get, self._dicts, self._attributes)

    def _report_replaced(self) -> None:
        for held, parameter in zip(self._held(), self._placeholders, strict=True):
            if held is not parameter:
                raise StateError(
                    f"the parameter {parameter.name!r} was replaced or removed after `shard`, so the engine would "
                    "train one that the model no longer has. Change the model before `shard`, or write values inside "
                    "`with unbounded.full_params(model):`."
                )

    def borrow(self, parameter: ManagedParameter) -> torch.Tensor:
        """The value of one parameter for a computation outside its module's forward.

        Outside a pass it is a copy, unless the unit is resident: nothing that lasts may alias bytes that go.
        """
        wants_graph = self.trainable and torch.is_grad_enabled()
        in_pass = self.keeper.borrow(self, counted=wants_graph and self._pass_views is None)
        views = self._pass_views if wants_graph and self._pass_views is not None else self.views()
        value = views[self._slot_pick[parameter._index]]
        return value if in_pass or self.resident else value.clone()

    def show_values(self) -> None:
        """Lets every managed parameter's own data be its part of the gathered buffer."""
        for parameter, view in zip(self.parameters, self.slot_views(self.fill), strict=True):
            show(parameter, view)

    def hide_values(self) -> None:
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            hide(parameter, slot.shape, self.dtype, self.device)

    def describe(self) -> str:
        where = "whole" if self.resident else f"{self.state.value}, kept on {self.weights.tier}"
        return f"unit={self.name!r}, {where}"


class _Views(torch.autograd.Function):
    """The gathered buffer as tensors of the graph; its backward is one call with every gradient of the unit."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, unit: Unit) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(_cut(unit._flat, unit._templates))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        unit: Unit = ctx.unit
        unit.keeper.gradients_ready(unit, list(map(gradients.__getitem__, unit._slot_pick)))
        return None, None


_anchors: dict[torch.device, torch.Tensor] = {}


def _anchor(device: torch.device) -> torch.Tensor:
    """An empty leaf that wants gradients, so that `_Views` has a place in the graph."""
    if device not in _anchors:
        _anchors[device] = torch.empty(0, device=device, requires_grad=True)
    return _anchors[device]


def _cut(flat: torch.Tensor, templates: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views with version counters of their own: a change of one parameter in place is not one of all the others."""
    return list(map(operator.attrgetter("data"), _unflatten(flat, templates)))


def _alias(storage: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A tensor over `storage`, whose bytes may not be there yet."""
    storage.resize_(numel * dtype.itemsize)
    alias = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]
    storage.resize_(0)
    return alias


def _templates(layout: Layout) -> tuple[list[torch.Tensor], list[int]]:
    """Shapes that cut a flat buffer into parameters and the padding between them, and where each slot comes out."""
    templates, picks, position = [], [], 0
    for slot in layout.slots:
        if slot.start > position:
            templates.append(torch.empty(slot.start - position, device="meta"))
        picks.append(len(templates))
        templates.append(torch.empty(slot.shape, device="meta"))
        position = slot.stop
    return templates, picks


def _put(dicts: list[dict[str, Any]], names: list[str], values: Any) -> None:
    # A loop in C: this runs twice a unit and pass, with as many places as the unit has parameters.
    deque(map(operator.setitem, dicts, names, values), maxlen=0)


def holds_storage(tensor: torch.Tensor, unit: Unit) -> bool:
    return tensor.untyped_storage()._cdata == unit.storage._cdata
