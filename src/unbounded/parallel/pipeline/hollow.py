"""A model of which this rank has some stages: its own forward runs on every rank, with the other stages left out.

The model's code stays in charge: on each rank it computes masks, positions and whatever else it makes of its inputs. A
last block before this stage returns what its stage sent; the block that ends this stage hands its output over and
leaves the forward. What goes from stage to stage is what the blocks return, so values besides the hidden states (the
position bias of T5) and the result of an encoder travel too.

    rank 0    embedding  b0   b1  | leaves
    rank 1    (NaN)      NaN  =   b2  b3  norm  head  loss        = returns what was received

Whatever else another stage has is NaN here, so that code which uses it cannot go unnoticed (`_check_made`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import PlanError, StateError
from unbounded.parallel.attachments import Detach, replace_forward, together
from unbounded.parallel.blocks import unwrap
from unbounded.parallel.pipeline.stages import Cutting
from unbounded.ranks.axis import Axis

# What the blocks of each stack returned last, by the stack's number.
Payload = dict[int, Any]


class Watcher(Protocol):
    """Told where a forward is."""

    def passed(self, stack: int | None) -> None:
        """A block of another stage was passed; gets the number of its stack if it is the last one there."""

    def ended(self, stack: int) -> None:
        """The last block of a stack has run here."""


class _Left(Exception):
    """The stage is over; raised through the model's forward."""


class _Beside(nn.Module):
    """Replaces a block in a stack, and answers what model code asks of its blocks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a child: the block keeps its one place in the model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)


class _Passed(_Beside):
    """A block of another stage: returns what was received for its stack."""

    def __init__(self, block: nn.Module, give: Callable[[], Any]) -> None:
        super().__init__(block)
        self.__dict__["give"] = give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["give"]()


class _Ending(_Beside):
    """A block whose output is kept for other stages; the last one of a stage leaves the forward."""

    def __init__(self, block: nn.Module, keep: Callable[[Any], None], *, leaves: bool) -> None:
        super().__init__(block)
        self.__dict__.update(keep=keep, leaves=leaves)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["block"](*args, **kwargs)
        self.__dict__["keep"](output)
        if self.__dict__["leaves"]:
            raise _Left
        return output


class HollowModel:
    """The stages of one rank inside the whole model. `run` is a forward of one of them."""

    def __init__(
        self,
        model: nn.Module,
        cutting: Cutting,
        axis: Axis,
        device: torch.device,
        lowered: torch.dtype | None = None,
    ) -> None:
        self.model, self.cutting, self.axis, self.rank = model, cutting, axis, axis.rank
        self._device, self._lowered = device, lowered  # `lowered`: what weights are computed in, if not their own dtype
        self._received: Payload = {}
        self._unknown: Payload = {}  # what stands for the outputs of passed blocks
        self._kept: Payload = {}
        self._reached = -1  # the last block that was passed in this forward
        self.is_rehearsed = False  # by the first batch of a pipeline over it
        self._checked: set[int] = set()  # chunks whose first forward was looked at
        self._removed: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._detaches: list[Detach] = []
        self._runs = self._leaves = False  # a stage; inside a forward that catches its end
        self.watcher: Watcher | None = None
        self.check: Callable[[Mapping[str, Any]], None] = lambda kwargs: None  # of what a call asks for
        # What calling the model outside `run` does, given the model's own forward and the arguments.
        self.answer: Callable[[Callable[..., Any], Any, Any], Any] | None = None
        self._views = [self._arrange(chunk) for chunk in range(cutting.chunks)]

    # -- what is here --------------------------------------------------------------------------------------------------

    def take_out(self) -> list[nn.Parameter]:
        """Removes the parameters of other ranks from the model, and returns them."""
        owners: dict[int, list[nn.Module]] = {}
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append(module)
        gone: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and self.rank not in self.cutting.holders(parameter, owners[id(parameter)]):
                    self._removed.append((module, name, parameter))
                    gone[id(parameter)] = parameter
        for module, name, _ in self._removed:
            module._parameters[name] = None
        return list(gone.values())

    def _nothing(self, dtype: torch.dtype) -> torch.Tensor:
        """NaN, so that any use of what another stage has shows. Model code may ask for its device, dtype and shape."""
        if dtype.is_floating_point:
            return torch.full((), float("nan"), dtype=self._lowered or dtype, device=self._device)
        return torch.zeros((), dtype=dtype, device=self._device)

    def absent(self) -> dict[int, dict[str, torch.Tensor]]:
        """What was taken out, by the id of its module and its name there."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for module, name, parameter in self._removed:
            found.setdefault(id(module), {})[name] = parameter
        return found

    def copies(self) -> dict[frozenset[int], list[nn.Parameter]]:
        """All parameters that several ranks hold, by these ranks. The same on every rank, before `take_out`."""
        owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(parameter, []).append(module)
        found: dict[frozenset[int], list[nn.Parameter]] = {}
        for parameter, modules in owners.items():
            ranks = self.cutting.holders(parameter, modules)
            if len(ranks) > 1:
                found.setdefault(ranks, []).append(parameter)
        return found

    def own_stacks(self) -> list[list[nn.Module]]:
        """The runs of blocks that run one after another on this rank."""
        runs = []
        for start, stop in self._own_bounds():
            position = 0
            for stack in self.cutting.stacks:
                run = [block for i, block in enumerate(stack, position) if start <= i < stop]
                position += len(stack)
                if run:
                    runs.append(run)
        return runs

    def _own_bounds(self) -> list[tuple[int, int]]:
        return list(self.cutting.bounds[self.rank :: self.cutting.num_ranks])

    # -- running -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Makes the model's forward end where a stage does, with NaN for the parameters of other stages."""
        for module, name, parameter in self._removed:
            module.__dict__[name] = self._nothing(parameter.dtype).expand(parameter.shape)
        blocks = [block for stack in self.cutting.stacks for block in stack]
        own = {block for run in self.own_stacks() for block in run}
        self._detaches.extend(replace_forward(block, _refuse_elsewhere) for block in blocks if block not in own)
        self._detaches.append(replace_forward(self.model, self._make_answering))
        base = unwrap(self.model)
        if base is not self.model:  # peft calls it alone, to generate
            self._detaches.append(replace_forward(base, self._make_answering))
        if self.axis.size > 1:
            self._detaches.append(self.model.register_state_dict_post_hook(partial(self._complete)).remove)
            self._detaches.append(self.model.register_load_state_dict_pre_hook(self._leave_out).remove)

    def detach(self) -> None:
        """Makes the model whole again, with the removed parameters and their old values."""
        together(*self._detaches)()
        self._detaches.clear()
        for module, name, parameter in self._removed:
            module.__dict__.pop(name, None)
            module._parameters[name] = parameter
        self._removed.clear()

    def run(
        self, chunk: int, received: Payload, args: Any, kwargs: Any, forward: Callable[..., Any] | None = None
    ) -> tuple[Any, Payload]:
        """A forward of one of this rank's stages: what the model returned (of the last), and what the blocks did.

        `forward` is the model's own, if its call has already begun.
        """
        self._received, self._kept, self._runs, self._reached = received, dict(received), True, -1
        try:
            with self._arranged(chunk):
                result = (forward or self.model)(*args, **kwargs)
        finally:
            kept, self._received, self._unknown, self._kept, self._runs = self._kept, {}, {}, {}, False
        if chunk not in self._checked:
            self._checked.add(chunk)
            self._check_made([kept, result])
        return result, kept

    def _check_made(self, made: Any) -> None:
        """Raises if a stage gives nothing but NaN: the model's code uses values that only other stages have."""
        tensors = [leaf for leaf in pytree.tree_leaves(made) if type(leaf) is torch.Tensor and leaf.is_floating_point()]
        if not any(tensor.numel() and bool(tensor.isnan().all()) for tensor in tensors):
            return
        inside = {module for stack in self.cutting.stacks for module in stack.modules()}
        names = {module: f"{name}." for name, module in self.model.named_modules() if name}
        lacks = [repr(names.get(module, "") + name) for module, name, _ in self._removed if module not in inside]
        raise PlanError(
            f"{type(self.model).__name__} gives NaN in the first forward of a pipeline stage. Here what the stage does "
            f"not have is NaN: {', '.join([*lacks[:4], 'the outputs of all earlier blocks but the last'])}. Unless the "
            "model gives NaN on one rank too, its own code uses one of these. Register layers that run before the "
            "blocks ahead of them, give a head with the embedding's weight as a module of its own, keep sums over "
            "blocks inside the blocks, or leave pipeline out of the plan."
        )

    def _make_answering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def leaving(*args: Any, **kwargs: Any) -> Any:
            if self._leaves:  # the base of a wrapped model: its wrapper is left too
                return forward(*args, **kwargs)
            self._leaves = True
            try:
                return forward(*args, **kwargs)
            except _Left:
                return list(self._kept.values())
            finally:
                self._leaves = False

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._runs or self.answer is None:
                return leaving(*args, **kwargs)
            return self.answer(leaving, args, kwargs)

        # generate() asks what a forward takes, and gives only that: positions among it.
        called.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        return called

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the model that a state dict has."""
        return {
            f"{path}.{name}": buffer
            for path, module in self.model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    @contextmanager
    def unchanged_buffers(self) -> Iterator[None]:
        """What forwards inside write into buffers is undone."""
        before = {name: buffer.clone() for name, buffer in self._buffers().items()}
        yield
        for name, buffer in self._buffers().items():
            buffer.copy_(before[name])

    @contextmanager
    def shared_buffers(self) -> Iterator[None]:
        """All ranks of the axis must enter this. Buffers that forwards inside change are changed on every rank.

        The first rank that has changed one gives its value: later ones may have run its module in vain.
        """
        before = {name: buffer.clone() for name, buffer in self._buffers().items()} if self.axis.size > 1 else {}
        yield
        if not before:
            return
        now = self._buffers()
        changed = {name: value.cpu() for name, value in now.items() if not torch.equal(value, before[name])}
        with torch.no_grad():
            for told in reversed(self.axis.objects(changed, "the exchange of buffers")):
                for name, value in told.items():
                    now[name].copy_(value)

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def _places(self, prefix: str) -> dict[str, bool]:
        """Every place for a tensor in the model by its key, in order, with whether another stage has it."""
        gone = {(id(module), name) for module, name, _ in self._removed}
        return {
            prefix + (f"{path}.{name}" if path else name): (id(module), name) in gone
            for path, module in self.model.named_modules()
            for name in [*module._parameters, *module._buffers]
        }

    def _complete(self, _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """All ranks must call this. Adds what the other stages have."""
        places = self._places(prefix)
        own = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for held in self.axis.objects(own):
            state.update({key: held[key] for key in held if places.get(key) and key not in state})
        for key in places:
            if key in state:
                state[key] = state.pop(key)

    def _leave_out(self, _: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key, is_elsewhere in self._places(prefix).items():
            if is_elsewhere:
                state.pop(key, None)

    @contextmanager
    def _arranged(self, chunk: int) -> Iterator[None]:
        """Inside, the stacks show the stage: blocks of other stages are passed."""
        whole = [stack._modules for stack in self.cutting.stacks]
        for stack, view in zip(self.cutting.stacks, self._views[chunk], strict=True):
            stack._modules = view  # type: ignore[assignment]
        try:
            yield
        finally:
            for stack, modules in zip(self.cutting.stacks, whole, strict=True):
                stack._modules = modules

    def _arrange(self, chunk: int) -> list[dict[str, nn.Module | None]]:
        start, stop = self._own_bounds()[chunk]
        total = sum(len(stack) for stack in self.cutting.stacks)
        views, position = [], 0
        for number, stack in enumerate(self.cutting.stacks):
            view: dict[str, nn.Module | None] = {}
            for key, block in stack._modules.items():
                assert block is not None
                view[key] = self._stand_in(block, number, position, (start, stop, total), is_last=position == stop - 1)
                position += 1
            last_key = next(reversed(view))
            if start <= position - 1 < stop - 1:  # other stages read what this stack ends with
                view[last_key] = _Ending(stack[-1], self._keeper(number, ends=True), leaves=False)
            views.append(view)
        return views

    def _stand_in(
        self, block: nn.Module, stack: int, position: int, bounds: tuple[int, int, int], *, is_last: bool
    ) -> nn.Module:
        start, stop, total = bounds
        if not start <= position < stop:
            ends = block is self.cutting.stacks[stack][-1]
            return _Passed(block, lambda: self._give(stack, position, ends=ends, is_received=position == start - 1))
        if is_last and stop < total:
            ends = block is self.cutting.stacks[stack][-1]
            return _Ending(block, self._keeper(stack, ends=ends), leaves=True)
        return block

    def _give(self, stack: int, position: int, *, ends: bool, is_received: bool) -> Any:
        if self.watcher is not None:
            self.watcher.passed(stack if ends else None)
        if stack not in self._received or position <= self._reached:
            raise StateError(
                f"block {position} of another pipeline stage was called out of order or a second time. Blocks of a "
                "pipelined model must be called once in a forward, in the order of their list."
            )
        self._reached = position
        if ends or is_received:
            return self._received[stack]
        if stack not in self._unknown:
            self._unknown[stack] = pytree.tree_map_only(torch.Tensor, _unknown, self._received[stack])
        return self._unknown[stack]

    def _keeper(self, stack: int, *, ends: bool) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            self._kept[stack] = output
            if ends and self.watcher is not None:
                self.watcher.ended(stack)

        return keep


def _unknown(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor.detach(), float("nan")) if tensor.is_floating_point() else tensor


def _refuse_elsewhere(_: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block that another stage has: runs only if a part of the model is called by itself."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StateError(
            "a block was called that another pipeline stage has. Call the model itself, on every rank, and not one of "
            "its parts (an encoder, or a generate that calls one)."
        )

    return refuse
