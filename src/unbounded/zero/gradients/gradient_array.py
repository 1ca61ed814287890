"""The bytes of a gradient on its tier: stored, added to, scaled, measured.

The first backward after a step stores the result of the reduction unchanged, which loses nothing. From the second
on, gradients are added up in the plan's accumulation dtype (fp32 by default), and the array stays that wide, so a job
that accumulates pays for it and one that does not keeps half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from unbounded.native import kernels
from unbounded.native.bulk import convert, new_tensor
from unbounded.tiers.array import PAGE, Array, MemoryArray, Waitable, stream_mark
from unbounded.tiers.pool import BufferPool
from unbounded.zero.gradients.scale_factor import ScaleFactor, scale_tensor


class Allocate(Protocol):
    """Makes an array on the gradient's tier."""

    def __call__(self, dtype: torch.dtype, numel: int, *, unplanned_bytes: int = 0) -> Array: ...


class GradientArray:
    """One flat array of `numel`, narrow (`wire`) or wide (`sum_dtype`). `array` is None while it has no memory."""

    def __init__(self, tier: str, numel: int, *, wire: torch.dtype, sum_dtype: torch.dtype) -> None:
        self.tier, self.numel, self.wire = tier, numel, wire
        self.sum_dtype = torch.promote_types(sum_dtype, wire) if sum_dtype != wire else wire
        self.array: Array | None = None
        self.is_wide = tier == "disk"  # there is no room for a second copy to widen from
        self.num_changes = 0  # counted before and after each, so that readers meanwhile can tell
        self._allocate_on: Allocate
        self._bounce: BufferPool
        self._threads: kernels.Pool | None = None

    def connect(self, allocate: Allocate, bounce: BufferPool, threads: kernels.Pool | None = None) -> None:
        """Sets where its memory comes from, the buffers through which the host reaches what it cannot address, and the
        threads that work on it; None: those of the process.
        """
        self._allocate_on, self._bounce, self._threads = allocate, bounce, threads

    def move(self, tier: str, allocate: Allocate) -> None:
        """Puts the next gradient on another tier; there must be none now."""
        if self.array is not None:
            self.array.free()
        self.array, self.tier, self._allocate_on = None, tier, allocate

    @property
    def dtype(self) -> torch.dtype:
        return self.wire if self.array is None else self.array.dtype

    def free(self) -> None:
        """Frees memory of the device; other tiers keep theirs for the next backward."""
        if self.tier == "device":
            self.array = None

    def outlast_stream(self) -> None:
        """Lets no other stream have the array's memory, once it is freed, before this stream has done its work."""
        if self.array is not None and self.array.direct is not None and self.array.direct.is_cuda:
            self.array.direct.record_stream(torch.cuda.current_stream(self.array.direct.device))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.num_changes += 1
        try:
            yield
        finally:
            self.num_changes += 1

    def store(self, part: torch.Tensor, counted: Sequence[tuple[int, int]] = ()) -> torch.Tensor | float:
        """Keeps `part`; returns the sum of squares of the stretches `counted`, taken where `part` is."""
        with self._changing():
            self.is_wide = self.is_wide or part.dtype != self.wire
            part = convert(part, self.sum_dtype if self.is_wide else self.wire)
            squares = self.squares_of(part, counted)
            if self.tier == "device":
                self.array = MemoryArray(part, "device")
                return squares
            if self.array is None or self.array.dtype != part.dtype:
                if self.array is not None:
                    self.array.free()
                self.array = self._allocate(part.dtype)
            self.array.evict(part).wait()
            return float(squares)  # they came before the copy, so nothing is left to wait for

    def squares_of(self, part: torch.Tensor, counted: Sequence[tuple[int, int]]) -> torch.Tensor | float:
        """The sum of squares of stretches of what is kept, or comes to be: a scalar tensor if a device has it."""
        return sum(self._sum_squares(part[start:stop]) for start, stop in counted if start < stop)

    def accumulate(self, part: torch.Tensor) -> float | None:
        """Adds `part`; returns the sum of squares of the result, or None if that would take another pass."""
        assert self.array is not None
        with self._changing():
            held = self.array
            is_widened = not self.is_wide and self.sum_dtype != self.wire
            if is_widened and self.tier == "device":
                self.array = MemoryArray(convert(held.direct, self.sum_dtype), "device")  # type: ignore[arg-type]
            elif is_widened:
                self.array = self._allocate(self.sum_dtype)
            self.is_wide = True
            if self.tier == "device":
                self.array.direct.add_(part)  # type: ignore[union-attr]
                return None
            try:
                return self._add(self.array, held, part)
            finally:
                if held is not self.array:
                    held.free()

    def _add(self, to: Array, held: Array, part: torch.Tensor) -> float:
        """to = held + part, where `to` may be `held`; both are on the host, or `to` is `held` on the disk."""
        if self.tier == "host" and part.device.type == "cuda":
            return self._add_arriving(to.direct, held.direct, part)  # type: ignore[arg-type]
        total, step = 0.0, self._host_step
        for start in range(0, self.numel, step):
            stop = min(start + step, self.numel)
            fresh = MemoryArray(part[start:stop], "device")
            with (
                _on_host(to, start, stop, self._bounce, write_back=True) as target,
                _on_host(fresh, 0, stop - start, self._bounce, write_back=False) as added,
            ):
                total += self._add_up(target, target if to is held else held.direct[start:stop], added)  # type: ignore[index]
        return total

    def _add_arriving(self, to: torch.Tensor, held: torch.Tensor, part: torch.Tensor) -> float:
        """One stretch is added while the next arrives in the other half of a buffer."""
        fresh, lease, total = MemoryArray(part, "device"), self._bounce.lease(), 0.0
        try:
            step = self._bounce.buffer_bytes // 2 // part.element_size()
            halves = lease.tensor(part.dtype, 2 * step).view(2, step)
            under_way: tuple[slice, torch.Tensor, Waitable] | None = None
            for index, start in enumerate(range(0, self.numel, step)):
                place = slice(start, min(start + step, self.numel))
                target = halves[index % 2, : place.stop - start]
                after = place, target, fresh.fetch(target, start)
                if under_way is not None:
                    total += self._add_arrived(to, held, *under_way)
                under_way = after
            if under_way is not None:
                total += self._add_arrived(to, held, *under_way)
            return total
        finally:
            lease.release(stream_mark(part))

    def squares(self, start: int, stop: int) -> torch.Tensor | float:
        """The same of a stretch of what is kept."""
        if self.array is None or start == stop:
            return 0.0
        if self.array.direct is not None:
            return self._sum_squares(self.array.direct[start:stop])
        return sum(float(self._sum_squares(part)) for _, part in self._parts(start, stop))

    def multiply(self, start: int, stop: int, factor: ScaleFactor) -> None:
        for part in self._within(start, stop):
            scale_tensor(part, factor)

    def clear(self, start: int, stop: int) -> None:
        """Writes zeros, also over what is not finite."""
        for part in self._within(start, stop):
            part.zero_()

    def write(self, start: int, values: torch.Tensor) -> None:
        position = 0
        for part in self._within(start, start + values.numel()):
            part.copy_(values[position : position + part.numel()])
            position += part.numel()

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """A copy of a stretch, on the host if it is not on the device."""
        assert self.array is not None
        if self.array.direct is not None:
            return convert(self.array.direct[start:stop], self.array.dtype, copy=True)
        value = new_tensor(stop - start, self.array.dtype, torch.device("cpu"))
        for position, part in self._parts(start, stop):
            value[position : position + part.numel()].copy_(part)
        return value

    @property
    def widens(self) -> bool:
        """Whether the next addition needs new memory on the device."""
        return self.tier == "device" and not self.is_wide and self.sum_dtype != self.wire

    def leave(self) -> None:
        """Leaves its memory on the device to whoever else holds it, and continues in a copy."""
        assert self.array is not None
        self.array = MemoryArray(convert(self.array.direct, self.array.dtype, copy=True), "device")  # type: ignore[arg-type]

    def _within(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """[start, stop) to change in place, in parts that go back to their tier."""
        if self.array is None or start == stop:
            return
        with self._changing():
            if self.array.direct is not None:
                yield self.array.direct[start:stop]
            else:
                for _, part in self._parts(start, stop, write_back=True):
                    yield part

    def _parts(self, start: int, stop: int, *, write_back: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """[start, stop) in parts that the host can address, each with its place; they begin on a page of the disk."""
        assert self.array is not None
        step = self._host_step
        for first in range(start // PAGE * PAGE, stop, step):
            last = min(first + step, self.numel)
            with _on_host(self.array, first, last, self._bounce, write_back=write_back) as held:
                low, high = max(start, first), min(stop, last)
                yield low - start, held[low - first : high - first]

    @property
    def _host_step(self) -> int:
        """Elements that a buffer of the host has room for in fp32, in whole pages of the disk."""
        return self._bounce.buffer_bytes // 4 // PAGE * PAGE

    def _allocate(self, dtype: torch.dtype) -> Array:
        """Placements count a gradient as it comes from the reduction; adding up takes more."""
        return self._allocate_on(dtype, self.numel, unplanned_bytes=self.numel * (dtype.itemsize - self.wire.itemsize))

    def _add_arrived(
        self, to: torch.Tensor, held: torch.Tensor, place: slice, fresh: torch.Tensor, arrival: Waitable
    ) -> float:
        arrival.wait()
        return self._add_up(to[place], held[place], fresh)

    def _add_up(self, to: torch.Tensor, held: torch.Tensor, fresh: torch.Tensor) -> float:
        if to.dtype != torch.float64:
            return kernels.add(to, held, fresh, pool=self._threads)
        torch.add(held, fresh, out=to)
        return float(self._sum_squares(to))

    def _sum_squares(self, part: torch.Tensor) -> torch.Tensor | float:
        """In float64; on CUDA as a tensor, so that nothing waits for it."""
        if part.is_cuda:
            return device_squares([part])[0]
        if part.dtype == torch.float64:
            return float(torch.linalg.vector_norm(part).square_())
        return kernels.sum_squares(part, pool=self._threads)


def device_squares(parts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The sum of squares of each of these tensors on a CUDA device, in float64, by one call for all of them."""
    norms = torch._foreach_norm(parts, 2.0, torch.float64)
    return torch._foreach_mul(norms, norms)


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
