"""Decides as it runs what a block may keep between its forward and its backward: as much as the device has room for.

The number of tokens is not known before a batch arrives, so nothing is planned: before each block the device's memory
is read, and the block keeps its activations if that leaves room for what must still come. That is

    this block     what blocks kept last time, for an input of this size
    later blocks   one input each, which is the least that they need
    the tail       what a pass takes beyond the end of its last block: logits, loss, gradients, one block run again

The tail is read from the device's peak at the end of the backward, in every pass. Weights that are gathered come and go
within a pass, so they count as a part of the tail and nowhere else. Each measured tail bounds the others:
a smaller input takes no more, and a larger one grows by the square at most. Before the first one, seven eighths of the
free memory are left for it before a block keeps anything, and inputs go to the host if a pass of a typical model would
not fit next to them. A peak left over from something else, such as a model's construction or an evaluation, says little
about the tail: if no pass of this size has reached a peak of its own, the next pass resets it. Host memory that a pass
took before its tail was known this precisely is freed.

Note: ranks decide alone. A block that is recomputed is gathered at the same place in the backward as one that is
kept, so the order of collectives does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unbounded.activations.structure import take_tensors

# What a block keeps, relative to its input, before one was measured: transformers keep 14 (fused) to 34 times as much.
FIRST_RATIO = 24.0
# What a whole pass takes, relative to a block's input, before one was measured: a recomputed block and its gradients.
FIRST_PASS_RATIO = 2 * FIRST_RATIO
# The share of the free memory that is left for a tail that was not measured yet.
FIRST_TAIL = 7 / 8


class Meter(Protocol):
    """Reads the memory of a device, as its allocator counts it."""

    def allocated_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def forget_peak(self) -> None: ...


class DeviceMeter:
    """A CUDA device. Its counts are kept on the host, so reading them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_bytes(self) -> int:
        return self._read("current")

    def peak_bytes(self) -> int:
        return self._read("peak")

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self, which: str) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"][which]) if stats else 0


class Tails:
    """The tails seen so far, by the size of a block's input."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # the least in every quarter of an octave

    def note(self, input_bytes: int, tail_bytes: int) -> None:
        octave = math.ceil(4 * math.log2(max(1, input_bytes)))
        size, least = self._seen.get(octave, (1, 2**62))
        if tail_bytes * size < least * input_bytes:
            self._seen[octave] = input_bytes, tail_bytes

    def expect(self, input_bytes: int) -> int | None:
        """The most that a tail takes for an input of this size; None before the first."""
        bounds = (int(tail * max(1.0, input_bytes / size) ** 2) for size, tail in self._seen.values())
        return min(bounds, default=None)


def choose_policy(
    *, free_bytes: int, input_bytes: int, kept_bytes: int, num_later: int, tail_bytes: int | None, first_tail: int
) -> str:
    """The cheapest policy of a block that leaves room for what comes. `first_tail`: before one was measured."""
    later = num_later * input_bytes
    if kept_bytes + later + (first_tail if tail_bytes is None else tail_bytes) <= free_bytes:
        return "keep"
    likely = min(first_tail, int(FIRST_PASS_RATIO * input_bytes)) if tail_bytes is None else tail_bytes
    return "host" if input_bytes + later + likely > free_bytes else "recompute"


@dataclass(eq=False)
class _SeenForward:
    """One forward of the model."""

    start_bytes: int  # held when it began, with the growth
    growth_bytes: int
    peak_bytes: int = 0  # of everything before its first block
    num_blocks: int = 0  # that have begun
    before_bytes: int = 0  # held before the block that runs now
    input_bytes: int = 1
    end_bytes: int = 0  # held after the last block so far
    keeps_all: bool = True
    is_watched: bool = False
    is_cautious: bool = False  # inputs went to the host for a tail that is only a bound


class Headroom:
    """Decides for the blocks of one model on one device. `begin` a forward, then `choose` and `note` around blocks.

    `has_host_room` says whether the host can take an input of so many bytes, `trim_host` frees unused host memory for
    inputs, `growth_bytes` says how much more the device will hold when the backward is over, `gathered_bytes` what
    weights take that come and go. `renew_limit` gives the limit for each forward.
    """

    def __init__(
        self,
        meter: Meter,
        limit_bytes: int,
        num_blocks: int,
        *,
        has_host_room: Callable[[int], bool] = lambda _: False,
        trim_host: Callable[[], None] = lambda: None,
        growth_bytes: Callable[[], int] = lambda: 0,
        gathered_bytes: Callable[[], int] = lambda: 0,
        renew_limit: Callable[[], int] | None = None,
    ) -> None:
        self.num_kept = 0  # in the last forward
        self.peak_bytes = 0  # the highest that a backward has reached since the caller set it to 0
        self.make_room: Callable[[int], None] = lambda _: None  # makes states free so many bytes of the device
        self._renew_limit = renew_limit
        self._short_from, self._short_bytes = 2**62, 0  # inputs from this size on did not fit; how much they leave free
        self._meter, self._limit, self._num_blocks = meter, limit_bytes, num_blocks
        self._has_host_room, self._trim_host = has_host_room, trim_host
        self._growth_bytes, self._gathered_bytes = growth_bytes, gathered_bytes
        self._tails, self._ratio, self._has_kept = Tails(), FIRST_RATIO, False
        self._own_peak_size, self._forgets_peak = 0, False  # the largest input whose pass reached its own peak
        self._pass = _SeenForward(0, 0)
        self.begin()

    def begin(self) -> None:
        """A forward of the model begins."""
        if self._pass.is_cautious:
            self._trim_host()
        if self._renew_limit is not None:
            self._limit = self._renew_limit()
        growth, self.num_kept = self._growth_bytes(), 0
        self._pass = _SeenForward(self._held_bytes() + growth, growth)

    def choose(self, inputs: Any) -> str:
        """The policy of the block that is about to run with `inputs`."""
        if self._pass.num_blocks >= self._num_blocks:  # a part of the model was called, so nobody announced the forward
            self.begin()
        passed = self._pass
        if passed.num_blocks == 0:
            self._ask_for_room(_largest_bytes(inputs))
        now = self._held_bytes()
        if passed.num_blocks == 0:
            if self._forgets_peak:
                self._meter.forget_peak()
            self._forgets_peak, passed.peak_bytes = False, self._meter.peak_bytes()
        passed.num_blocks += 1
        passed.before_bytes, passed.input_bytes = now, _largest_bytes(inputs)
        kept, tail = int(self._ratio * passed.input_bytes), self._tails.expect(passed.input_bytes)
        if tail is not None and not self._has_kept:
            kept = max(kept, tail)  # which included a recomputed block, whatever that keeps
        gathered = self._gathered_bytes() if tail is None else 0
        policy = choose_policy(
            free_bytes=self._limit - now - gathered - passed.growth_bytes - self._left_free(passed.input_bytes),
            input_bytes=passed.input_bytes,
            kept_bytes=kept,
            num_later=self._num_blocks - passed.num_blocks,
            tail_bytes=tail,
            first_tail=int((self._limit - passed.start_bytes) * FIRST_TAIL),
        )
        if policy == "host" and not self._has_host_room(passed.input_bytes):
            return "recompute"
        passed.is_cautious |= policy == "host" and passed.input_bytes > self._own_peak_size
        return policy

    @property
    def limit_bytes(self) -> int:
        """What may be allocated of the device."""
        return self._limit

    @property
    def kept_bytes(self) -> int:
        """What blocks kept in the last forward besides their inputs, which could be recomputed."""
        return int(self.num_kept * max(0.0, self._ratio - 1) * self._pass.input_bytes)

    def _ask_for_room(self, input_bytes: int) -> None:
        """Before the first block of a pass: makes states free the memory that the pass is likely to lack."""
        expected = self._tails.expect(input_bytes)
        likely = int(FIRST_PASS_RATIO * input_bytes) + self._gathered_bytes()
        needed = (likely if expected is None else min(expected, likely)) + self._left_free(input_bytes)
        missing = needed + self._pass.growth_bytes + self._held_bytes() - self._limit
        if missing > 0:
            self.make_room(missing)

    def note_shortage(self) -> None:
        """The running forward, or its backward, did not fit: the next one of this size leaves an eighth more free."""
        self._short_from = min(self._short_from, self._pass.input_bytes)
        self._short_bytes = min(self._short_bytes + self._limit // 8, self._limit)

    def _held_bytes(self) -> int:
        """Allocated now, without gathered weights."""
        return self._meter.allocated_bytes() - self._gathered_bytes()

    def _left_free(self, input_bytes: int) -> int:
        return self._short_bytes if input_bytes >= self._short_from else 0

    @torch.compiler.disable
    def note(self, outputs: Any, *, kept: bool) -> None:
        """The block has run."""
        passed = self._pass
        passed.end_bytes = self._held_bytes()
        if kept:
            self.num_kept, self._has_kept = self.num_kept + 1, True
            # What other streams used may be freed meanwhile, so the figure of one block may be too small.
            self._ratio = max((passed.end_bytes - passed.before_bytes) / passed.input_bytes, 0.9 * self._ratio, 1.0)
        passed.keeps_all = passed.keeps_all and kept
        if not passed.is_watched:
            passed.is_watched = self._watch(passed, outputs)

    def _watch(self, passed: _SeenForward, outputs: Any) -> bool:
        """Makes the tail be read when the backward reaches the output of the first block.

        A tail includes a recomputed block; if there was none, what a block keeps is added.
        """

        def settle(_: torch.Tensor) -> None:
            peak, size = self._meter.peak_bytes(), passed.input_bytes
            self.peak_bytes = max(self.peak_bytes, peak)
            self._tails.note(size, int(passed.keeps_all * self._ratio * size) + max(0, peak - passed.end_bytes))
            if peak > passed.peak_bytes:
                self._own_peak_size = max(self._own_peak_size, size)
            elif size > self._own_peak_size and not passed.keeps_all:
                self._forgets_peak = True

        tensors, _ = take_tensors(outputs)
        watched = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if watched is None:
            return False
        watched.register_hook(settle)
        return True


def _largest_bytes(inputs: Any) -> int:
    """The bytes of the largest tensor: what passes from block to block. Expanded ones count as stored."""
    tensors, _ = take_tensors(inputs)
    return max((min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors), default=1) or 1
