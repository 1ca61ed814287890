"""A unit at run time: parameters that move together in one flat buffer, and the bytes under it.

    RELEASED --request--> FETCHING --order_stream--> GATHERED --release--> RELEASED
       STALE --request--> FETCHING                     |
         ^------------------- update ------------------+        (weights that are whole on the device)

RELEASED: no bytes. STALE: the bytes are there, but the owned weights were updated since. FETCHING: a lane brings them.
GATHERED: they may be read. Only `Gathering` moves a unit between these. A *resident* unit (weights whole on the device)
is never RELEASED. Every change of the weights raises `generation`, so that a graph built before it is refused (see
`saved`).
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from unbounded.native.bulk import Backing
from unbounded.native.thread_pool import Pool
from unbounded.optim.formats import MASTER_STATES
from unbounded.optim.granularity import Granularity
from unbounded.optim.rules import UpdateRule
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.lane import Handle
from unbounded.tiers.reader import Reader
from unbounded.zero import saved
from unbounded.zero.delivery import Delivery
from unbounded.zero.factors import Factors
from unbounded.zero.gradients.gradient import Gradient
from unbounded.zero.layout import Layout, clip_range, find_runs

_data = operator.attrgetter("data")
_owners = torch._C._storage_Use_Count
_unflatten = torch._C._nn.unflatten_dense_tensors  # one call makes the views of a whole unit


def _most_held(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The most references to one of these: of Python, and of torch, which holds what it saves for a backward."""
    return max(map(sys.getrefcount, tensors)), max(map(torch.Tensor._use_count, tensors))  # type: ignore[attr-defined]


_ONLY_IN_A_LIST = _most_held([torch.empty(0, dtype=torch.uint8, device="cpu")])


class WeightState(Enum):
    RELEASED = "released"
    STALE = "stale"
    FETCHING = "fetching"
    GATHERED = "gathered"


class UnitLending(Protocol):
    """Who hands out single parameters (`Lending`)."""

    def borrow(self, unit: Unit, index: int, *, from_all: bool = False) -> torch.Tensor: ...

    def keep(self, unit: Unit, index: int, value: torch.Tensor, *, from_all: bool = False) -> None: ...

    def overwrite(self, unit: Unit, index: int, value: torch.Tensor, *, from_all: bool) -> None: ...

    def snapshot(self, unit: Unit, index: int) -> torch.Tensor: ...


class UnitGradients(Protocol):
    """Who knows the norms of single gradients, and can make them whole (`GradientAgreement`)."""

    def slot_norms(self, unit: Unit) -> torch.Tensor: ...

    def lend(self, unit: Unit) -> None: ...


class UnitEngine(Protocol):
    """The engine as a unit and its parameters see it."""

    @property
    def lending(self) -> UnitLending: ...

    @property
    def gradients(self) -> UnitGradients: ...

    is_shown: bool

    def before_reading(self, unit: Unit) -> None: ...

    def gradients_ready(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None: ...

    def gradients_complete(self, unit: Unit) -> None: ...

    def train(self, unit: Unit, index: int, *, is_trained: bool) -> None: ...

    def is_in_pass(self) -> bool: ...


class Views(Protocol):
    """What modules hold of a unit, and when (`ModuleViews`)."""

    hooks: dict[int, OrderedDict[int, Any]]
    frozen: set[int]
    first_gradients: list[torch.Tensor | None]
    unasked: dict[Any, str]
    is_swapped: bool
    accumulator: Any

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...

    @property
    def leaves(self) -> Sequence[nn.Parameter]: ...

    def swap_in(self) -> None: ...

    def stay(self) -> None: ...

    def swap_out(self) -> None: ...

    def end_forward(self) -> list[int]: ...

    def count_writes(self, offset: int) -> int: ...

    def take_rebound(self) -> list[int]: ...

    def show(self) -> None: ...

    def hide(self) -> None: ...

    def place_data(self) -> None: ...

    def take_over_training(self) -> None: ...

    def watch(self) -> None: ...

    def stop_watching(self) -> None: ...

    def make(self) -> Sequence[torch.Tensor]: ...

    def take_shown(self) -> None: ...

    def note_change(self) -> None: ...


class Unit:
    """See the module's docstring. `owned` is the part of the flat buffer whose states this rank keeps."""

    def __init__(self, name: str, layout: Layout, *, dtype: torch.dtype, device: torch.device, trainable: bool) -> None:
        self.name, self.layout, self.dtype, self.device = name, layout, dtype, device
        self.trainable = trainable
        self.numel = sum(slot.numel for slot in layout.slots)
        self._note_groups()
        self._templates, self.picks = _templates(layout)
        self._gaps = [index for index in range(len(self._templates)) if index not in self.picks]  # padding
        self._take_storage()

        # Where it lives; set when the model is built, and again when a frozen unit is first trained (`thawing`).
        self.owned = (0, layout.numel)
        self.resident = False
        self.streamed = False  # states on the host, updated by the GPU
        self.is_packed = False  # frozen weights on host or disk
        self.weights: Array
        self.rule: UpdateRule | None = None  # what updates it, with `states`; None: nothing does
        self.rule_if_trained: UpdateRule | None = None  # what would update it if it were trained
        self.states: dict[str, Array] = {}
        self.homes: tuple[int, ...] = ()  # which rank makes each parameter whole, if an update needs that
        self.rank = 0
        self.factors = Factors()
        self.gradient: Gradient
        self.engine: UnitEngine
        self.views: Views

        # The gathered weights: `Gathering` moves these.
        self.state = WeightState.RELEASED
        self.claims = 0  # visits, past and expected, that want it gathered
        self.reading: Handle | None = None  # its part comes from disk, ahead of the fetch
        self.fetching: Handle | None = None
        self.delivery: Delivery | None = None  # where an update in flight puts the new weights, for who waits for them

        # The optimizer's update: `Updates` sets these.
        self.generation = 0  # changes of the weights so far
        self.weights_ready: Handle | None = None  # the update in flight: done when the new weights are in their arrays
        self.states_written: Handle | None = None  # done when the new states are too
        self.num_writes = 0  # changes of weights and states not made by updates, counted before and after each
        self._reader: Reader | None = None  # a save that still reads the owned states: updates wait for it
        self.steps = np.zeros(len(layout.slots), dtype=np.int64)  # updates each parameter has had
        self.scalars: list[dict[str, float]] = [{} for _ in layout.slots]

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps the states of the whole unit."""
        return self.owned == (0, self.layout.numel)

    @property
    def needs_wholes(self) -> bool:
        """Whether its update sees whole parameters."""
        return self.rule is not None and self.rule.granularity is Granularity.TENSOR

    @property
    def delivers(self) -> bool:
        """Whether its update has new weights in a buffer before they are in their tier (see `delivery`)."""
        direct = self.weights.direct
        return direct is None or direct.device != (self.device if self.needs_wholes else kernel_device(self))

    def is_updated_here(self, index: int) -> bool:
        """Whether this rank computes the update of a parameter, or of a part of it."""
        if self.needs_wholes and not self.is_whole:
            return self.homes[index] == self.rank
        slot = self.layout.slots[index]
        return clip_range(slot.start, slot.stop, *self.owned) is not None

    @property
    def every(self) -> dict[str, int]:
        """How many parameters share an element of each state."""
        return {} if self.rule is None else {spec.name: spec.every for spec in self.rule.specs}

    @property
    def has_master(self) -> bool:
        """Whether there is more than the weights, so that the next update would undo a write to the buffer alone."""
        return any(name in self.states for name in MASTER_STATES)

    @property
    def num_bytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    def begin_training(
        self,
        gradient: Gradient,
        owned: tuple[int, int],
        rule: UpdateRule | None,
        states: dict[str, Array],
        *,
        streamed: bool,
    ) -> None:
        """From now on it is trained. While it was frozen, ranks may have owned more of it."""
        self.gradient, self.owned, self.rule, self.states = gradient, owned, rule, states
        self.trainable, self.streamed = True, streamed
        if self.resident:
            self.weights = MemoryArray(self.owned_part(), "device")

    def move_states(self, states: dict[str, Array], *, streamed: bool) -> dict[str, Array]:
        """Keeps its states in other arrays; returns those that it had."""
        before, self.states, self.streamed = self.states, states, streamed
        return before

    def swap_arrays(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Keeps its weights ("weight") and these states in other arrays; returns all that it had."""
        before = self.arrays()
        self.weights = arrays["weight"]
        self.states.update({name: array for name, array in arrays.items() if name != "weight"})
        return before

    def arrays(self) -> dict[str, Array]:
        """The owned weights, as "weight", and the states."""
        return {"weight": self.weights, **self.states}

    # -- a save that reads it ------------------------------------------------------------------------------------

    def be_read_by(self, reader: Reader) -> None:
        """A save reads the owned weights and states from now on: whoever changes them calls `make_way` first.

        So does whoever lends the memory of weights to those who may change them.
        """
        self._reader = reader

    def make_way(self, pool: Pool | None = None) -> None:
        """Returns when no save reads the owned weights and states any more; `pool` copies what it still needs."""
        if self._reader is not None:
            self._reader.make_way(pool)
            self._reader = None

    def spoil_save(self, what: str) -> None:
        """The owned weights were changed by `what`, which nobody had expected: a save that reads them fails."""
        if self._reader is not None:
            self._reader.spoil(what)

    def hand_over_reader(self, *, keeps_states: bool) -> Reader | None:
        """Passes the save that reads the arrays, if there is one, to whoever has them from now on.

        If that is only the weights, the save still reads the unit's states too.
        """
        reader = self._reader
        self._reader = reader if keeps_states else None
        return reader

    def regroup(self, groups: Mapping[int, int]) -> None:
        """Puts the slots at these indices into other groups of the optimizer. They stay where they are."""
        slots = tuple(replace(s, group=groups.get(index, s.group)) for index, s in enumerate(self.layout.slots))
        self.layout = self.gradient.layout = replace(self.layout, slots=slots)
        self._note_groups()

    def _note_groups(self) -> None:
        """A parameter in no group has a gradient if it is trained, but no update."""
        groups = [slot.group for slot in self.layout.slots]
        self.is_grouped = np.array([group >= 0 for group in groups], dtype=np.uint8)
        self.group_runs = find_runs(self.layout, [group if group >= 0 else None for group in groups])

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _take_storage(self) -> None:
        # Aliases with their own version counters: filling the buffer is not a change that autograd should see.
        with torch.inference_mode(False):
            self.backing = Backing(self.num_bytes, self.device)
            self.storage = self.backing.storage
            self.buffer = _alias(self.storage, self.dtype, self.layout.numel)
            self._flat = _alias(self.storage, self.dtype, self.layout.numel)
            self._parts = _unflatten(self._flat, self._templates)
        self.backing.give_back()
        self._lasting: list[torch.Tensor] | None = None  # views without a graph, which stay from pass to pass
        self._num_owners = _owners(self.storage._cdata)
        saved.settle_in(self)

    def allocate(self) -> None:
        self.backing.take()

    def hold_whole(self) -> None:
        """Takes memory for the weights of a resident unit before any pass; what is put there counts as gathered."""
        self.allocate()
        self.state = WeightState.GATHERED

    def deallocate(self) -> None:
        """Frees the bytes, or leaves them to whoever else still holds a tensor over them."""
        if _owners(self.storage._cdata) <= self._num_owners and not self._lends_lasting():
            self.backing.give_back()
        else:
            if self.device.type == "cuda":  # the fetch lane's memory, which others use on this stream and free
                self.buffer.record_stream(torch.cuda.current_stream(self.device))
            saved.move_out(self)
            self._take_storage()

    def _lends_lasting(self) -> bool:
        """Whether anybody else holds one of the lasting views themselves, which the storage's count does not show."""
        return bool(self._lasting) and any(map(operator.gt, _most_held(self._lasting), _ONLY_IN_A_LIST))  # type: ignore[arg-type]

    def __del__(self, move_out: Callable[[Unit], None] = saved.move_out) -> None:
        move_out(self)  # bound early: when the interpreter ends, modules may be gone before their objects

    def owned_part(self) -> torch.Tensor:
        """This rank's part of the gathered buffer."""
        return self.buffer[self.owned[0] : self.owned[1]]

    def part(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """A view of the gathered buffer, which is fetched if it is not there."""
        self.engine.before_reading(self)
        return self._flat.as_strided(shape, stride, offset).data

    def count_writes(self, offset: int) -> int:
        """How often forwards have written in place to the parameter at `offset` of the buffer so far."""
        return self.views.count_writes(offset)

    def slot_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat`, of the layout's length, as one view per parameter."""
        return list(map(_unflatten(flat, self._templates).__getitem__, self.picks))

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Writes zeros to `flat`, of the layout's length, where no parameter is."""
        if self._gaps:
            torch._foreach_zero_(list(map(_unflatten(flat, self._templates).__getitem__, self._gaps)))

    def cut(self) -> list[torch.Tensor]:
        """Fresh views of the gathered buffer, one for every slot and for the padding between slots.

        Each has its own version counter: changing one parameter in place does not change all the others.
        """
        return list(map(_data, self._parts))

    def lasting_views(self) -> Sequence[torch.Tensor]:
        """The same without a graph, made once for each storage."""
        if torch.is_inference_mode_enabled():  # such views could not be saved for a backward later
            return _unflatten(self._flat, self._templates)
        if self._lasting is None:
            self._lasting = self.cut()
            self._num_owners += len(self._lasting)
            for view in self._lasting:  # code that registers them again inside a forward must see parameters
                view._is_param = True  # type: ignore[attr-defined]
        return self._lasting

    def take_lasting_views(self) -> list[torch.Tensor]:
        """Those that there are; the next ones have new version counters."""
        lasting, self._lasting = self._lasting or [], None
        self._num_owners -= len(lasting)
        return lasting

    def note_change(self) -> None:
        """The weights change, so graphs that were built before are outdated."""
        self.generation += 1
        self.views.note_change()

    def forget_update(self) -> None:
        """The states were replaced from outside, so the last update no longer matters."""
        self.weights_ready = self.states_written = None
        self.num_writes += 1
        self.note_change()

    def spoil(self, error: Exception) -> None:
        """Marks the states as unusable: whoever needs them gets `error`, until `forget_update`."""
        self.weights_ready = Handle()
        self.weights_ready.fail(error)

    def describe(self) -> str:
        where = "whole" if self.resident else f"{self.state.value}, kept on {self.weights.tier}"
        return f"unit={self.name!r}, {where}"


def kernel_device(unit: Unit) -> torch.device:
    """Where a unit is updated: on the GPU if its states live there or are streamed to it, otherwise on the host."""
    if unit.streamed:
        return unit.device
    directs = [array.direct for array in (unit.states or {"weight": unit.weights}).values()]
    if all(direct is not None and direct.device == unit.device for direct in directs):
        return unit.device
    return torch.device("cpu")


def _alias(storage: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A tensor over `storage`."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]


def _templates(layout: Layout) -> tuple[list[torch.Tensor], list[int]]:
    """Shapes that cut a flat buffer into parameters and the padding between them, and where each slot comes out."""
    shapes: list[Sequence[int]] = []
    picks, position = [], 0
    for slot in layout.slots:
        shapes += [(slot.start - position,)] if slot.start > position else []
        picks.append(len(shapes))
        shapes.append(slot.shape)
        position = slot.stop
    shapes += [(layout.numel - position,)] if layout.numel > position else []
    return [torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes], picks
