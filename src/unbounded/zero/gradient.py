"""The gradient of one unit's owned part between its backward and its update, on its tier.

The first backward after a step stores what came out of the reduction as it is; nothing is lost by that. From
the second on gradients are added up in the plan's accumulation dtype (fp32 unless said), and the store stays
that wide, so a job that accumulates pays for it and one that does not keeps half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from unbounded.native import kernels
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.lane import Handle
from unbounded.tiers.pool import BufferPool


class Allocate(Protocol):
    """Makes an array on the gradient's tier."""

    def __call__(self, dtype: torch.dtype, numel: int, *, unplanned_bytes: int = 0) -> Array: ...


class Gradient:
    """Holds, adds up and hands out the owned part of a unit's gradient."""

    def __init__(self, tier: str, numel: int, wire: torch.dtype, sum_dtype: torch.dtype) -> None:
        self.tier, self.numel, self.wire = tier, numel, wire
        self.sum_dtype = torch.promote_types(sum_dtype, wire) if sum_dtype != wire else wire
        self.present = False
        self.consumed = False  # an update scaled or freed it: it cannot be added to
        self.clipped = False  # a factor waits for the step, which must not scale what comes later
        self.handle: Handle | None = None  # the last addition in flight
        self.array: Array | None = None
        self._wide = tier == "disk"  # there a second copy, to widen from, has no room
        self._squares: torch.Tensor | float | None = None

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def add(self, part: torch.Tensor, allocate: Allocate, bounce: BufferPool, *, measure: bool) -> None:
        """Adds `part` (reduced, this rank's, on the device). Runs in the reduce lane."""
        self._squares = None
        self._wide = self._wide or part.dtype != self.wire
        if not self.present:
            self._store(part, allocate)
            if measure and not self._wide:
                self._squares = sum_squares(part)
        else:
            self._accumulate(part, allocate, bounce)
        self.present, self.consumed = True, False

    def squares(self, bounce: BufferPool) -> torch.Tensor | float:
        """The sum of squares: a float, or a scalar tensor where the device has it."""
        if self._squares is None:
            assert self.array is not None
            direct = self.array.direct
            if direct is not None:
                self._squares = sum_squares(direct)
            else:
                self._squares = 0.0
                for start, stop in _stretches(self.numel, bounce):
                    with _on_host(self.array, start, stop, bounce, write_back=False) as part:
                        self._squares += sum_squares(part)
        return self._squares

    def forget_squares(self) -> None:
        """Its values may change from outside."""
        self._squares = None

    @property
    def growth_bytes(self) -> int:
        """What the device will hold more of once another backward was added: the first is kept as it came."""
        if self.tier != "device" or not self.present or self._wide:
            return 0
        return self.numel * (self.sum_dtype.itemsize - self.wire.itemsize)

    def drop(self) -> None:
        """Forgets the gradient; memory on the device goes back at once."""
        if self.handle is not None:
            self.handle.settle()  # what is under way must not land afterwards
        self.present = self.consumed = self.clipped = False
        self._squares = self.handle = None
        if self.tier == "device":
            self.array = None

    def use_up(self) -> None:
        """Frees the gradient's memory on the device after an update that is final, before `drop` is called."""
        self.consumed = True
        if self.tier == "device":
            self.array = None

    def _store(self, part: torch.Tensor, allocate: Allocate) -> None:
        dtype = self.sum_dtype if self._wide else self.wire
        if self.tier == "device":
            self.array = MemoryArray(part.to(dtype), "device")
            return
        if self.array is None or self.array.dtype != dtype:
            if self.array is not None:
                self.array.free()
            self.array = self._allocate(dtype, allocate)
        self.array.evict(part.to(dtype)).wait()

    def _accumulate(self, part: torch.Tensor, allocate: Allocate, bounce: BufferPool) -> None:
        assert self.array is not None
        if not self._wide and self.sum_dtype != self.wire:
            self._widen(allocate)
        self._wide = True
        if self.tier == "device":
            self.array.direct.add_(part)  # type: ignore[union-attr]
            return
        for start, stop in _stretches(self.numel, bounce):
            with (
                _on_host(MemoryArray(part, "device"), start, stop, bounce, write_back=False) as fresh,
                _on_host(self.array, start, stop, bounce, write_back=True) as held,
            ):
                _add_up(held, fresh)

    def _widen(self, allocate: Allocate) -> None:
        """In memory: on disk it is wide from the start."""
        assert self.array is not None
        narrow = self.array
        if self.tier == "device":
            self.array = MemoryArray(narrow.direct.to(self.sum_dtype), "device")  # type: ignore[union-attr]
            return
        self.array = self._allocate(self.sum_dtype, allocate)
        kernels.convert(narrow.direct, self.array.direct)  # type: ignore[arg-type]
        narrow.free()

    def _allocate(self, dtype: torch.dtype, allocate: Allocate) -> Array:
        """Placements count a gradient as it comes out of the reduction: whoever adds up takes more."""
        return allocate(dtype, self.numel, unplanned_bytes=self.numel * (dtype.itemsize - self.wire.itemsize))


def sum_squares(part: torch.Tensor) -> torch.Tensor | float:
    """In float64; on CUDA the root of it in float32 first, and as a tensor, so that nothing waits for it."""
    if part.dtype == torch.float64:
        return torch.linalg.vector_norm(part).square_()
    if part.device.type == "cpu":
        return kernels.sum_squares(part)
    return torch.linalg.vector_norm(part, dtype=torch.float32).double().square_()


def _add_up(held: torch.Tensor, fresh: torch.Tensor) -> None:
    if held.dtype == torch.float64:
        held.add_(fresh)
    else:
        kernels.accumulate(held, fresh)


def _stretches(numel: int, bounce: BufferPool) -> Iterator[tuple[int, int]]:
    """[0, numel) in parts that fit a buffer in fp32 and start on a page of the disk in every dtype."""
    step = bounce.buffer_bytes // 4
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


@contextmanager
def _on_host(array: Array, start: int, stop: int, bounce: BufferPool, *, write_back: bool) -> Iterator[torch.Tensor]:
    """A stretch of an array as the host can address it: itself, or a pinned copy that goes back at the end."""
    if array.direct is not None and array.direct.device.type == "cpu":
        yield array.direct[start:stop]
        return
    lease = bounce.lease()
    try:
        part = lease.tensor(array.dtype, stop - start)
        array.fetch(part, start).wait()
        yield part
        if write_back:
            array.evict(part, start).wait()
    finally:
        lease.release()
