"""A device budget that is kept, as the driver counts it.

The budget minus what the process takes outside torch's allocator (context, kernels, collectives: `DriverCount`) is the
*cap*: torch's allocator may not exceed it, so slack and fragmentation are included. It is read again in each of the
first forwards, while kernels are still being loaded. What blocks may keep is decided within the cap (`headroom`). If a
batch still does not fit, the allocation that fails raises a `BudgetError` in the forward or the backward. Nothing is
killed, states are untouched, and a smaller batch works.

The cap is for the process, so the budgets of several models add up. Without a budget in the plan there is no cap.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from unbounded.activations.structure import take_tensors
from unbounded.errors import BudgetError
from unbounded.own_hook import OwnHook
from unbounded.planner.sizes import format_bytes
from unbounded.tiers.driver import DriverCount, allocator_fraction, count_device

# Room for kernels that the next pass may load, after the first forwards.
MARGIN_BYTES, NUM_FIRST = 64 * 2**20, 4
RENEW_EVERY = 32


class Allocator(Protocol):
    """The part of a device's allocator that a promise needs."""

    def set_cap(self, num_bytes: int | None) -> None: ...

    def allocated_bytes(self) -> int: ...

    def free_cached(self) -> None: ...


class DeviceShortage(BudgetError, torch.OutOfMemoryError):
    """A batch that does not fit. It can also be caught as torch's own error."""


class CudaAllocator:
    """torch's caching allocator for one GPU. A fraction that the user has set is not raised."""

    _ours: ClassVar[dict[torch.device, tuple[float, float]]] = {}  # what we have set, and what the user had before

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = torch.cuda.get_device_properties(device).total_memory

    def set_cap(self, num_bytes: int | None) -> None:
        now, (ours, given) = allocator_fraction(self._device), self._ours.get(self._device, (-1.0, 1.0))
        given = given if abs(now - ours) < 1e-6 else now
        fraction = min(given, 1.0 if num_bytes is None else num_bytes / self._total)
        self._ours[self._device] = fraction, given
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def free_cached(self) -> None:
        torch.cuda.empty_cache()


class DevicePromise:
    """One model's budget of a device. `states` says what its states and gathered weights take there now;
    `on_shortage` is called when a batch did not fit.
    """

    def __init__(self, budget_bytes: int, driver: DriverCount, allocator: Allocator) -> None:
        self.budget_bytes, self.driver, self.allocator = budget_bytes, driver, allocator
        self.batch = ""
        self.states: Callable[[], int] = lambda: 0
        self.on_shortage: Callable[[], None] = lambda: None
        self._num_forwards = 0
        self.cap_bytes = 0
        self.check()
        self.renew()
        weakref.finalize(self, _apply_caps, allocator).atexit = False

    def check(self) -> None:
        context, coming = self.driver.context_bytes(), self.driver.coming_bytes()
        if self.budget_bytes <= context + coming:
            raise BudgetError(
                f"device_bytes is {format_bytes(self.budget_bytes)}, but the GPU's context with its kernels takes "
                f"{format_bytes(context)} of it. Raise it to at least "
                f"{format_bytes(2 * (context + coming))}."
            )

    def keep(self) -> None:
        """From now on the allocator stays within the cap."""
        _promises.add(self)
        _apply_caps(self.allocator)

    def attach(self, model: nn.Module, states: Callable[[], int]) -> Callable[[], None]:
        """Follows a model whose states are in place; the returned function ends the promise."""
        self.states = states
        self.allocator.free_cached()
        self.keep()

        @torch._dynamo.disable
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin(args, kwargs)

        handle = model.register_forward_pre_hook(OwnHook(begin), with_kwargs=True, prepend=True)

        def end() -> None:
            handle.remove()
            _promises.discard(self)
            _apply_caps(self.allocator)

        return end

    def begin(self, args: Any, kwargs: Any) -> None:
        """A forward of the model begins with these inputs. The promise whose forward began last explains a shortage."""
        global _current
        _current = weakref.ref(self)
        self.batch = describe_batch(args, kwargs)
        self._num_forwards += 1
        if self._num_forwards <= NUM_FIRST + 1 or self._num_forwards % RENEW_EVERY == 0:
            self.renew()

    def renew(self) -> None:
        """Reads what is outside the allocator, and gives the allocator the rest."""
        context = self.driver.context_bytes()
        margin = self.driver.coming_bytes() if self._num_forwards <= NUM_FIRST else MARGIN_BYTES
        cap = max(0, self.budget_bytes - context - margin)
        if cap != self.cap_bytes:
            self.cap_bytes = cap
            if self in _promises:
                _apply_caps(self.allocator)
        if self in _promises and self.driver.taken_bytes() > sum(promise.budget_bytes for promise in _promises):
            self.allocator.free_cached()

    def shortage(self, num_bytes: int) -> DeviceShortage:
        """The error for the user if `num_bytes` more are not available."""
        self.on_shortage()
        taken, states, context = self.allocator.allocated_bytes(), self.states(), self.driver.context_bytes()
        rest = max(0, taken - states)
        largest = "activations and what is computed with them" if rest >= states else "states and gathered weights"
        needed = taken + num_bytes + self.budget_bytes - self.cap_bytes
        remedy = (
            'activations="host" if blocks keep more than their inputs, or '
            if rest >= states
            else 'weights or an optimizer on "host" for more units, optimizer_format="compact", or '
        )
        return DeviceShortage(
            f"the device is out of memory. The batch ({self.batch or 'none yet'}) does not fit into "
            f"device_bytes={format_bytes(self.budget_bytes)}: {format_bytes(num_bytes)} more are needed, with "
            f"{format_bytes(states)} taken by states and gathered weights, {format_bytes(rest)} by activations and "
            f"what is computed with them, and {format_bytes(context)} by the GPU's context. The most is taken by "
            f"{largest}. The states are as they were: run fewer tokens at once and accumulate more often, or set "
            f"{remedy}device_bytes to {format_bytes(needed * 1.1)} or more."
        )


_promises: weakref.WeakSet[DevicePromise] = weakref.WeakSet()
_current: weakref.ref[DevicePromise] | None = None
_is_watching = False


def _apply_caps(allocator: Allocator) -> None:
    caps = [promise.cap_bytes for promise in _promises]
    allocator.set_cap(sum(caps) if caps else None)


def promise_device(device: torch.device, budget_bytes: int) -> DevicePromise:
    """A promise that the process stays within `budget_bytes` of a GPU.

    It is kept from here on, unless a model that was built on the GPU already fills it.
    """
    use_expandable_segments()
    promise = DevicePromise(budget_bytes, count_device(device), CudaAllocator(device))
    _watch_allocations()
    if promise.allocator.allocated_bytes() < promise.cap_bytes // 2:
        promise.keep()
    return promise


def explain_shortage(num_bytes: int) -> None:
    """Called by the allocator when it must give up: raises our error instead of its own."""
    promise = _current() if _current is not None else None
    if promise is None:
        promise = next(iter(_promises), None)
    if promise is not None and promise in _promises:
        raise promise.shortage(num_bytes)


def _watch_allocations() -> None:
    """Makes torch's allocator call us before it raises its own error, on any thread."""
    global _is_watching
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and not _is_watching:
        attach(lambda device, num_bytes, allocated, free: explain_shortage(num_bytes))
        _is_watching = True


def use_expandable_segments() -> None:
    """Lets the allocator join what it has freed, unless the user has configured it."""
    given = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    choose = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    choose = choose or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if not given and choose is not None:
        with suppress(RuntimeError):  # a backend that has none
            choose("expandable_segments:True")


def describe_batch(args: Any, kwargs: Any) -> str:
    """The shapes of a forward's inputs, as a user knows them."""
    shown = [_describe(value) for value in args]
    shown += [f"{name} {_describe(value)}" for name, value in kwargs.items() if take_tensors(value)[0]]
    return ", ".join(shown)


def _describe(value: Any) -> str:
    tensors, _ = take_tensors(value)
    return " and ".join(str(list(tensor.shape)) for tensor in tensors) or type(value).__name__
