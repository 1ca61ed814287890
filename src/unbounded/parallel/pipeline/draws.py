"""Random numbers of a pipeline: every stage draws what the one-rank model would draw in its place.

One rank runs micro-batches one after another, so the state in which a stage begins a micro-batch depends on everything
drawn before. Each stage finds out once what it draws (which operators, and the shapes that they are given) and tells
the others. At the start of a batch, every rank skips everybody's numbers in the order of the one-rank model, and keeps
the states in which its own stages begin. On CUDA a state is a counter, so nothing has to be drawn, only added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.tensor.dropout import drops_anything
from unbounded.ranks.axis import Axis


@dataclass(frozen=True)
class _Outline:
    """A tensor of a draw without its values, on which it hardly ever depends how many numbers are drawn."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def fill(self) -> torch.Tensor:
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        values = torch.ones(max(0, length), dtype=self.dtype, device="cpu")
        return values.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _Draw:
    """An operator that has drawn numbers, by its name and overload, and its arguments."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self) -> None:
        """Draws as many numbers again."""
        namespace, name = self.name.split("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), self.overload or "default")
        args, kwargs = pytree.tree_map_only(_Outline, _Outline.fill, (self.args, self.kwargs))
        operator(*args, **kwargs)


class _DrawRecorder(TorchDispatchMode):
    """Notes which operators draw from the generator of the CPU: those that change its state, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[_Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = torch.get_rng_state(), kwargs or {}
        outlines = pytree.tree_map_only(torch.Tensor, _outline, (args, kwargs))  # before it may write to them
        result = func(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            self.draws.append(_Draw(func._schema.name, func._schema.overload_name, *outlines))
        return result


def _outline(tensor: torch.Tensor) -> _Outline:
    return _Outline(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class HostNumbers:
    """Random numbers on the CPU: there is only a state, and skipping numbers means drawing them."""

    def __init__(self) -> None:
        self._recorder = _DrawRecorder()

    def state(self) -> Any:
        return torch.get_rng_state()

    def go_to(self, state: Any) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def noting(self) -> Iterator[None]:
        self._recorder = _DrawRecorder()
        with self._recorder:
            yield

    def noted(self) -> list[_Draw]:
        """What was drawn since this was last asked."""
        draws, self._recorder.draws = self._recorder.draws, []
        return draws

    def pass_over(self, draws: Sequence[_Draw]) -> None:
        for draw in draws:
            draw.repeat()


class DeviceNumbers:
    """Random numbers on a GPU: a counter that goes up by what is drawn."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._start = 0

    def state(self) -> Any:
        return self._generator.get_offset()

    def go_to(self, state: Any) -> None:
        self._generator.set_offset(state)

    @contextmanager
    def noting(self) -> Iterator[None]:
        self._start = self.state()
        yield

    def noted(self) -> int:
        """How far the counter went since this was last asked."""
        start, self._start = self._start, self.state()
        return int(self._start - start)

    def pass_over(self, draws: int) -> None:
        self.go_to(self.state() + draws)


# What a stage draws, in stretches: each ends with the last block of a stack, or with the stage (None).
Stretches = list[tuple[Any, int | None]]


class _Noting:
    """Follows a forward whose draws are noted."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
        self.stretches: Stretches = []

    def passed(self, stack: int | None) -> None:
        self.numbers.noted()  # drawn in vain, or counted by another stage
        self.stretches.clear()

    def ended(self, stack: int | None) -> None:
        self.stretches.append((self.numbers.noted(), stack))


class _Placing:
    """Follows a forward and puts the random state where the one-rank model has it."""

    def __init__(self, numbers: Any, states: dict[Any, Any], micro: int, start: Any) -> None:
        self.numbers, self.states, self.micro, self.start = numbers, states, micro, start

    def passed(self, stack: int | None) -> None:
        self.numbers.go_to(self.start if stack is None else self.states["end", stack, self.micro])

    def ended(self, stack: int) -> None:
        pass


class Draws:
    """What all stages draw, and the states in which this rank's stages begin their micro-batches."""

    def __init__(self, axis: Axis, hollow: HollowModel, device: torch.device) -> None:
        self.axis, self.hollow = axis, hollow
        self.numbers: Any = DeviceNumbers(device) if device.type == "cuda" else HostNumbers()
        self._is_needed: bool | None = None  # until a batch was noted
        self._known: dict[Any, list[Stretches]] = {}
        self._own: list[Stretches] | None = None
        self._states: dict[Any, Any] = {}
        self._after: Any = None

    def is_needed(self) -> bool:
        """Whether stages draw anything. It may be so until a batch was noted."""
        return self.axis.size > 1 and self._is_needed is not False

    def knows(self, key: Any) -> bool:
        return key in self._known

    @contextmanager
    def recording(self, key: Any) -> Iterator[None]:
        """Inside, each forward of a stage is noted; afterwards every rank knows what all stages draw."""
        before, self._own = self.numbers.state(), []
        try:
            yield
        finally:
            own, self._own = self._own, None
            self.numbers.go_to(before)
        told = self.axis.objects((own, drops_anything(self.hollow.model)))
        stages = [told[stage % self.axis.size][0][stage // self.axis.size] for stage in range(self._num_stages)]
        drawn = any(draws for stretches in stages for draws, _ in stretches)
        self._known[key] = stages
        self._is_needed = self._is_needed or drawn or any(drops for _, drops in told)

    def lay_out(self, key: Any, num_micros: int) -> None:
        """Skips what the one-rank model would draw for a batch, and keeps the states that are needed here."""
        self._states.clear()
        for micro in range(num_micros):
            for stage, stretches in enumerate(self._known[key]):
                self._states["begin", stage, micro] = self.numbers.state()
                for draws, stack in stretches:
                    self.numbers.pass_over(draws)
                    if stack is not None:
                        self._states["end", stack, micro] = self.numbers.state()
        self._after = self.numbers.state()

    @contextmanager
    def at(self, stage: int, micro: int) -> Iterator[None]:
        """Inside, a stage draws for a micro-batch. What runs before its first block draws in vain."""
        try:
            if self._own is not None:
                noting = self.hollow.watcher = _Noting(self.numbers)
                with self.numbers.noting():
                    yield
                    noting.ended(None)
                self._own.append(noting.stretches)
                return
            if self._states:
                start = self._states["begin", stage, micro]
                self.hollow.watcher = _Placing(self.numbers, self._states, micro, start)
                self.numbers.go_to(start)
            yield
        finally:
            self.hollow.watcher = None

    def finish(self) -> None:
        """Ends the batch: sets the state that the one-rank model has after it."""
        if self._states:
            self.numbers.go_to(self._after)
        self._states.clear()

    @property
    def _num_stages(self) -> int:
        return self.axis.size * self.hollow.cutting.chunks
