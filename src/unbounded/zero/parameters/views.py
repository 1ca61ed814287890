"""What modules hold: views of the gathered buffer inside a forward, the user's own Parameter objects outside.

The views of one forward come from one autograd node per unit (`_GraphViews`), whose inputs are the parameters. Its
backward gets every gradient of the unit in one call. In `backward()` the engine takes them; `torch.autograd.grad`
and `backward(inputs=...)` get exactly what they ask for, since autograd sees the parameters as leaves of the graph. The
first parameter's accumulator says when the last use of the unit in a backward is over.
"""

from __future__ import annotations

import math
import operator
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from unbounded.errors import StateError
from unbounded.zero.members import Member
from unbounded.zero.parameters.followed_view import forget_plain
from unbounded.zero.parameters.parameter import (
    ManagedParameter,
    hide,
    manage,
    refuse_replaced,
    set_data,
    set_requires_grad,
    show,
    take_hooks,
    take_stray_gradients,
)
from unbounded.zero.passes.hooks import in_backward, in_recomputation
from unbounded.zero.placeholder import stand_in
from unbounded.zero.unit import Unit

_OWN = {"_unit_ref", "_index", "_held", "_is_param"}
_version = operator.attrgetter("_version")
_will_execute = torch._C._will_engine_execute_node
_first = operator.itemgetter(0)
_is_there = partial(operator.is_not, None)
_SOME_GIVEN = 4096


class ModuleViews:
    """The places of one unit's parameters in the modules, and what is in them."""

    def __init__(self, unit: Unit, members: Sequence[Member]) -> None:
        self._unit_ref = weakref.ref(unit)  # which has this
        by_name = {member.names[0]: member for member in members}
        ordered = [by_name[slot.name] for slot in unit.layout.slots]
        places = [(m._parameters, attribute, i) for i, member in enumerate(ordered) for m, attribute in member.holders]
        self.first_gradients = [member.parameter.grad for member in ordered]  # from before `shard`
        self.parameters = [manage(member.parameter, unit, i) for i, member in enumerate(ordered)]
        wholes = [member.whole for member in ordered if member.whole is not None]  # one for each, if these are tiles
        self.leaves = [*self.parameters, *wholes]  # what users may ask autograd for
        self._pins = [weakref.ref(parameter) for parameter in self.parameters]  # swap_tensors refuses what has one
        self._dicts = [place[0] for place in places]
        self._attributes = [place[1] for place in places]
        self._pick = [unit.picks[place[2]] for place in places]
        self._placeholders = [self.parameters[place[2]] for place in places]
        self._kept = [*map(vars, self.parameters)]  # with what users keep on them
        self._lent: list[dict[str, Any]] = []  # what of that is on the views that the modules hold
        found = {index: take_hooks(parameter) for index, parameter in enumerate(self.parameters)}
        self.hooks = {index: hooks for index, hooks in found.items() if hooks}  # what users have registered
        self.frozen: set[int] = set()  # parameters that were frozen after `shard`: their gradients are left out
        self.is_swapped = False  # the modules hold views now
        self._serves_graphs = False  # those that they hold were made where gradients are recorded
        self._held: Sequence[torch.Tensor] = ()  # what they hold in the running forward
        self._shown_trained: list[bool] = []  # which were trained when they were last shown
        self._num_changes = 0  # of the weights since they hold it
        self._starts = [slot.start for slot in unit.layout.slots]
        self._num_writes: Counter[int] = Counter()  # to parameters in place, by forwards that are over
        self._given: list[weakref.ref[torch.Tensor]] = []  # views of weights that stay, which graphs may hold
        self._most_given = _SOME_GIVEN
        self.unasked: dict[Any, str] = {}  # functions that were given weights and have run modules again since
        self.accumulator: Any = None  # of the first parameter that is trained
        self._watched: tuple[ManagedParameter, RemovableHandle] | None = None

    @property
    def unit(self) -> Unit:
        unit = self._unit_ref()
        assert unit is not None
        return unit

    def make(self) -> Sequence[torch.Tensor]:
        """Views of the gathered buffer: in the graph if gradients are needed, otherwise plain ones."""
        if self.unit.trainable and torch.is_grad_enabled():
            if torch._C._are_functorch_transforms_active():
                raise StateError(
                    "torch.func's transforms (grad, vmap, jacrev) cannot follow the weights of a sharded model, which "
                    "come and go. Use torch.autograd.grad, or give the transform a plain copy: copy.deepcopy(model)."
                )
            views = _GraphViews.apply(self.unit, *self.leaves)
            if views[0].requires_grad:
                if in_backward():
                    self._note_function()
                if self.unit.resident or in_backward():  # a graph holds them: nothing is saved by name in a backward
                    self._note_given(views)
                return views  # type: ignore[no-any-return]
        return self.unit.lasting_views()

    def _note_function(self) -> None:
        """In the backward of a function that was given weights of the unit, a module gets other views of them.

        If it then asks for gradients of those that it was given, it gets none. The new views have a backward if it asks
        for those of the parameters.
        """
        function = torch._C._current_autograd_node()
        if not isinstance(function, BackwardCFunction):  # not one of Python's
            return
        given = [number for node, number in function.next_functions if _is_of(node, self.unit)]
        if given and not in_recomputation():
            self.unasked[function] = self.unit.layout.slots[self.unit.picks.index(given[0])].name

    def _note_given(self, views: Sequence[torch.Tensor]) -> None:
        """Remembers them until the weights change."""
        self._given += map(weakref.ref, views)
        if len(self._given) > self._most_given:  # many forwards without a step; what is gone is forgotten now and then
            self._given = [*map(weakref.ref, _alive(self._given))]
            self._most_given = max(_SOME_GIVEN, 2 * len(self._given))

    def note_change(self) -> None:
        """The weights change, so a graph that holds views of them is refused, as in plain PyTorch."""
        if self.unit.resident or self._given:
            torch.autograd.graph.increment_version([*_alive(self._given), *self.unit.take_lasting_views()])
            self._num_changes += 1
            self._given.clear()

    def swap_in(self) -> None:
        """Puts views of the gathered buffer into the modules."""
        if not self.is_swapped:
            self._refuse_replaced(self._placeholders)
        self._note_writes()
        self.is_swapped, self._num_changes, self._serves_graphs = True, 0, torch.is_grad_enabled()
        views = self._held = self.make()
        self._lend_attributes(views)
        _put(self._dicts, self._attributes, map(views.__getitem__, self._pick))

    def stay(self) -> None:
        """The same if the modules hold none, or only such as no graph can be recorded of."""
        if not self.is_swapped or (torch.is_grad_enabled() and not self._serves_graphs):
            self.swap_in()

    def swap_out(self) -> None:
        """Puts the managed parameters back into the modules."""
        if self.is_swapped:
            self.is_swapped, self._held = False, ()
            _put(self._dicts, self._attributes, self._placeholders)

    def end_forward(self) -> list[int]:
        """The parameters that the forward has written to in place. Raises if it has put others in their places."""
        if self.is_swapped:
            self._refuse_replaced([*map(self._held.__getitem__, self._pick)])
        written = self._note_writes()
        if written:
            self.unit.take_lasting_views()
        return written

    def count_writes(self, offset: int) -> int:
        """How often forwards have written in place to the parameter at `offset` of the buffer so far."""
        index = bisect_right(self._starts, offset) - 1
        written = _version(self._held[self.unit.picks[index]]) - self._num_changes if self._held else 0
        return self._num_writes[index] + int(written)

    def _note_writes(self) -> list[int]:
        """The modules hold what they have no longer; returns the parameters that were written to in place."""
        views, self._held = self._held, ()
        self._take_attributes(views)
        if torch.is_inference_mode_enabled() or all(map(self._num_changes.__eq__, map(_version, views))):
            return []
        versions = [views[place]._version - self._num_changes for place in self.unit.picks]
        written = {index: number for index, number in enumerate(versions) if number}
        self._num_writes.update(written)
        return [*written]

    def _lend_attributes(self, views: Sequence[torch.Tensor]) -> None:
        """What users keep on their parameters is there inside forwards too."""
        is_any = max(map(len, self._kept)) > 2  # more than the unit and the index
        self._lent = [{name: kept[name] for name in _users(kept)} for kept in self._kept] if is_any else []
        for place, lent in zip(self.unit.picks, self._lent, strict=True) if is_any else ():
            held = vars(views[place])
            for name in _users(held) - lent.keys():  # from a forward before, on a view that lasts
                del held[name]
            held.update(lent)

    def _take_attributes(self, views: Sequence[torch.Tensor]) -> None:
        """What forwards have changed of that, or added to it, stays on the parameters.

        Views on which nothing was lent are not looked at: that would cost each of them a dict.
        """
        all_lent, self._lent = self._lent, []
        for place, kept, lent in zip(self.unit.picks, self._kept, all_lent, strict=True) if views and all_lent else ():
            held = vars(views[place])
            kept.update({name: held[name] for name in _users(held) if held[name] is not lent.get(name, kept)})

    def take_rebound(self) -> list[int]:
        """The parameters whose view has other data now; the buffer takes that data."""
        views, parts, rebound = self._held, self.unit.slot_views(self.unit.buffer), []
        for index, (place, part) in enumerate(zip(self.unit.picks, parts, strict=True)) if views else ():
            if views[place].data_ptr() != part.data_ptr() and views[place].shape == part.shape:
                part.copy_(views[place].detach())
                rebound.append(index)
        if rebound:
            self.unit.take_lasting_views()
        return rebound

    def show(self) -> None:
        """Makes every parameter a plain one whose data is its part of the gathered buffer."""
        self._shown_trained = [parameter.requires_grad for parameter in self.parameters]
        for parameter, view in zip(self.parameters, self.unit.slot_views(self.unit.buffer), strict=True):
            show(parameter, view)

    def take_shown(self) -> None:
        """Brings the values of shown parameters that are in other memory to the gathered buffer."""
        unit = self.unit
        for index, (parameter, view) in enumerate(zip(self.parameters, unit.slot_views(unit.buffer), strict=True)):
            if parameter.data_ptr() != view.data_ptr() or parameter.shape != view.shape:
                self._take_data(parameter, index, view)

    def hide(self) -> None:
        """Takes over what users did to the shown parameters, and hides them again."""
        unit = self.unit
        self.take_shown()
        for parameter in self.parameters:
            hide(parameter)
            if not unit.resident:
                forget_plain(parameter)
        for held, parameter, places, attribute in zip(
            self._standing(), self._placeholders, self._dicts, self._attributes, strict=True
        ):
            if held is not parameter and isinstance(held, torch.Tensor):  # a new Parameter was put in its place
                self._take_data(held, parameter._index, unit.slot_views(unit.buffer)[parameter._index])
                places[attribute] = parameter

    def take_over_training(self) -> None:
        """What users froze and unfroze while parameters were shown."""
        for parameter, before in zip(self.parameters, self._shown_trained, strict=True):
            if (is_trained := parameter.requires_grad) != before:
                set_requires_grad(parameter, before)
                parameter.requires_grad_(is_trained)

    def place_data(self) -> None:
        """Sets the data of hidden parameters: their part of a resident buffer, otherwise a stand-in."""
        unit = self.unit
        values = unit.slot_views(unit.buffer) if unit.resident else None
        for index, (parameter, slot) in enumerate(zip(self.parameters, unit.layout.slots, strict=True)):
            set_data(parameter, values[index] if values else stand_in(slot.shape, unit.dtype, unit.device))
        self.watch()

    def watch(self) -> None:
        """Learns from the first trained parameter when the unit's part in a backward is over."""
        first = next((parameter for parameter in self.parameters if parameter.requires_grad), None)
        held = self._watched[0] if self._watched else None
        if first is held or in_backward():
            return
        self.stop_watching()
        if first is not None and self.unit.trainable:
            self.accumulator = _accumulator(first)
            self._watched = first, self.accumulator.register_hook(partial(_complete, self._unit_ref))

    def stop_watching(self) -> None:
        """Backwards no longer report here. Whoever keeps a unit keeps the node, which would report to a dead engine."""
        if self._watched is not None:
            self._watched[1].remove()
        self.accumulator = self._watched = None

    def _take_data(self, parameter: torch.Tensor, index: int, view: torch.Tensor) -> None:
        """`p.data = x` inside full_params, or a value that ranks have joined: this is the new one."""
        cut, value = self.unit.layout.slots[index].cut, parameter.detach()
        shape = view.shape if cut is None else cut.shape
        if value.shape != shape:
            raise StateError(
                f"a parameter of unit {self.unit.name!r} was given the shape {tuple(value.shape)} inside "
                f"full_params, but is sharded as {tuple(shape)}. Resize the model before `shard`."
            )
        view.copy_(value if cut is None else cut.take(value))

    def _standing(self) -> Iterator[Any]:
        return map(dict.get, self._dicts, self._attributes)

    def _refuse_replaced(self, expected: Sequence[torch.Tensor]) -> None:
        """Raises if the modules hold anything but what is `expected` in the places of the unit's parameters."""
        if not all(map(operator.is_, self._standing(), expected)):
            found = zip(self._standing(), expected, self._placeholders, strict=True)
            refuse_replaced(next(parameter.name for held, own, parameter in found if held is not own))


def _users(attributes: dict[str, Any]) -> set[str]:
    """Without the library's own, and without what torch.compile notes on tensors that it sees."""
    return {name for name in attributes.keys() - _OWN if "_dynamo" not in name}


def takes_gradients(units: Iterable[Unit]) -> bool:
    """Whether the backward that runs gives any of the units its gradients, which `torch.autograd.grad` does not."""
    return _will_any_execute(unit.views.accumulator for unit in units if unit.views.accumulator is not None)


def gets_gradients(unit: Unit) -> bool:
    """Whether the backward that runs gives this unit a gradient, as far as its graph shows."""
    if takes_gradients([unit]):
        return True
    # `backward(inputs=...)` may leave out the first one.
    return _will_any_execute(_accumulator(p) for p in unit.views.leaves if p.requires_grad)


def _will_any_execute(nodes: Iterable[Any]) -> bool:
    try:
        return any(map(_will_execute, nodes))
    except RuntimeError:  # raised for leaves inside `torch.autograd.grad`, and only there
        return False


def refuse_unasked_gradients(units: Iterable[Unit]) -> None:
    """Raises where a function has run a module again in its backward and has not asked for its gradients."""
    for name in [name for unit in units for name in take_unasked(unit)]:
        raise StateError(
            f"{name!r} was given to a torch.autograd.Function whose backward runs the module again. Its gradient would "
            "be lost: the module has other tensors in that run than those that the function was given. Use "
            'torch.utils.checkpoint or the plan\'s activations="recompute" instead, or take gradients with respect to '
            "module.parameters() inside that backward."
        )


def take_unasked(unit: Unit) -> list[str]:
    """The names of weights that such functions were given, which are forgotten."""
    names = list(unit.views.unasked.values())
    unit.views.unasked.clear()
    return names


def _is_of(node: Any, unit: Unit) -> bool:
    return isinstance(node, _GraphViews._backward_cls) and node.unit is unit  # type: ignore[attr-defined]


def refuse_stray_gradients(units: Iterable[Unit]) -> None:
    """Raises where a backward has gone past the engine: through functions that take parameters as they are."""
    strays = [(unit, index) for unit in units for index in take_stray_gradients(unit.views.parameters)]
    for unit, index in strays:
        raise StateError(
            f"a gradient of {unit.layout.slots[index].name!r} has gone past the engine and would be lost. Leave out "
            "DistributedDataParallel around the model: the sharded model averages over the ranks itself. Where a "
            "torch.autograd.Function, or scripted or compiled code, was given the parameter object, which holds no "
            "values while it is sharded: take it from its module inside the forward (self.layer.weight), or give such "
            "code parameter.view_as(parameter). Where a loss was made of parameters themselves inside full_params: "
            "make it outside."
        )


class _GraphViews(torch.autograd.Function):
    """The gathered buffer as tensors of the graph; its backward is one call with every gradient of the unit."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *parameters: nn.Parameter) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.function = torch._C._current_autograd_node() if in_backward() else None  # whose backward this is made in
        ctx.set_materialize_grads(False)
        return tuple(unit.cut())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        unit: Unit = ctx.unit
        if ctx.function is not None:
            unit.views.unasked.pop(ctx.function, None)
        found = list(map(gradients.__getitem__, unit.picks))
        taken = _taken_by_leaves(ctx, found)
        if taken is None:
            return (None, *found, *_of_wholes(unit, found))
        if any(map(_is_there, taken)):
            if torch.is_grad_enabled():  # only if the backward creates a graph
                _refuse_graph(unit, taken)
            if forward_ad._current_level >= 0:  # gradients may have tangents, which units do not keep
                taken = [part if part is None else forward_ad.unpack_dual(part).primal for part in taken]
            unit.engine.gradients_ready(unit, taken)
        return (None,) * (1 + len(unit.views.leaves))


def _of_wholes(unit: Unit, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What each tile's gradient adds to that of the whole, which `torch.autograd.grad` may be asked for."""
    return [
        None if gradient is None else _in_whole(gradient, slot.first, slot.whole)
        for gradient, slot in zip(gradients, unit.layout.slots, strict=True)
        if slot.whole is not None
    ]


def _in_whole(gradient: torch.Tensor, first: int, shape: tuple[int, ...]) -> torch.Tensor:
    rest = math.prod(shape) - first - gradient.numel()
    return functional.pad(gradient.reshape(-1), (first, rest)).view(shape)


def _refuse_graph(unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
    """The engine keeps the values of gradients. A loss of them would be a constant, without a word."""
    for slot, gradient in zip(unit.layout.slots, gradients, strict=True):
        if gradient is not None and gradient.requires_grad:
            raise StateError(
                f"backward(create_graph=True) would give the sharded parameter {slot.name!r} a gradient that can be "
                "differentiated, but its unit keeps only values. Use torch.autograd.grad(loss, parameters, "
                "create_graph=True), whose results have a graph."
            )


def _taken_by_leaves(ctx: Any, found: list[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """The gradients that leaves accumulate in this backward; None if the caller of `torch.autograd.grad` gets them.

    All of them in `backward()`, and those asked for in `backward(inputs=...)`.
    """
    nodes = list(map(_first, ctx.next_functions))
    try:
        if None not in nodes and all(map(_will_execute, nodes)):
            return found
        executed = [node is not None and _will_execute(node) for node in nodes]
    except RuntimeError:  # raised for leaves inside `torch.autograd.grad`, and only there
        return None
    if len(nodes) > len(found):  # a tile, of which users know only the whole
        executed = list(map(operator.or_, executed[: len(found)], executed[len(found) :]))
    return [part if is_taken else None for part, is_taken in zip(found, executed, strict=True)]


def _alive(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """What is still there, also if only a graph holds it."""
    found = [*filter(_is_there, map(weakref.ref.__call__, references))]
    deque(map(torch.Tensor._fix_weakref, found), maxlen=0)  # type: ignore[attr-defined]
    return found  # type: ignore[return-value]


def _accumulator(parameter: nn.Parameter) -> Any:
    """The parameter's node of the graph; it runs once per backward, after every use of its unit."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _complete(reference: weakref.ref[Unit], *_: Any) -> None:
    unit = reference()
    if unit is not None:
        unit.engine.gradients_complete(unit)


def _put(dicts: list[dict[str, Any]], names: list[str], values: Any) -> None:
    # A loop in C: this runs twice per unit and pass, with as many places as the unit has parameters.
    deque(map(operator.setitem, dicts, names, values), maxlen=0)
