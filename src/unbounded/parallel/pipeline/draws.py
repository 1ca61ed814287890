"""Random numbers of a pipeline: every stage draws what the one-rank model would draw in its place.

One rank runs micro-batches one after another, so the state in which a stage begins a micro-batch depends on everything
drawn before. Each stage finds out once what it draws (the shapes of its dropouts) and tells the others. At the start of
a batch, every rank skips everybody's numbers in the order of the one-rank model, and keeps the states in which its own
stages begin. On CUDA a state is a counter, so nothing has to be drawn, only added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.tensor.dropout import drops_anything
from unbounded.ranks.axis import Axis

# A draw: the torch function, which draws one number per element, the shape, and for dropout its part.
Draw = tuple[str, tuple[int, ...], torch.dtype, float]
_PLAIN = {torch.rand: "rand", torch.randn: "randn", torch.rand_like: "rand", torch.randn_like: "randn"}


class _DrawRecorder(TorchFunctionMode):
    """Notes what is drawn, but not from somebody's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout):
            self._note(*args, **kwargs)
        elif func is nn.functional.scaled_dot_product_attention:
            self._note_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _PLAIN and kwargs.get("generator") is None:
            self.draws.append((_PLAIN[func], tuple(result.shape), result.dtype, 0.0))
        return result

    def _note(self, x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **kwargs: Any) -> None:
        if kwargs.get("train", training) and p > 0:
            self.draws.append(("dropout", tuple(x.shape), x.dtype, p))

    def _note_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: Any, mask: Any = None, dropout_p: float = 0.0, **_: Any
    ) -> None:
        if dropout_p > 0:
            self.draws.append(("dropout", (*query.shape[:-1], key.shape[-2]), query.dtype, dropout_p))


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

    def noted(self) -> list[Draw]:
        """What was drawn since this was last asked."""
        draws, self._recorder.draws = self._recorder.draws, []
        return draws

    def pass_over(self, draws: Sequence[Draw]) -> None:
        for kind, shape, dtype, p in draws:
            if kind == "dropout":
                nn.functional.dropout(torch.ones((), dtype=dtype, device="cpu").expand(shape), p, training=True)
            else:
                getattr(torch, kind)(shape, dtype=dtype, device="cpu")


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
        self._is_needed: bool | None = None
        self._known: dict[Any, list[Stretches]] = {}
        self._own: list[Stretches] | None = None
        self._states: dict[Any, Any] = {}
        self._after: Any = None

    def is_needed(self) -> bool:
        """Whether several stages draw anything."""
        if self._is_needed is None:
            self._is_needed = self.axis.size > 1 and any(self.axis.objects(drops_anything(self.hollow.model)))
        return self._is_needed

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
        told = self.axis.objects(own)
        self._known[key] = [told[stage % self.axis.size][stage // self.axis.size] for stage in range(self._num_stages)]

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
