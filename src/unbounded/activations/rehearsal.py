"""What a `Headroom` will decide for the blocks of a model: it decides for a device that is only counted.

So a prediction has the same rules as the run. A headroom learns from pass to pass, as in training: before the first
tail it leaves most of the device free, and until a block was kept, it takes what one keeps for as much as the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unbounded.activations.headroom import Headroom

# A headroom has settled well before: the first pass measures a tail, the next ones what blocks keep.
MOST_PASSES = 8


@dataclass(frozen=True)
class BlockSizes:
    """Device memory of one block of a micro-batch: its input, and what it keeps for its backward."""

    input_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class PassSizes:
    """Device memory of a pass: what is there before its first block, and what comes on top of what the blocks hold.

    At the `turn` that may include a block that runs again; at the `end`, when blocks hold nothing, all gradients.
    """

    start_bytes: int
    turn_bytes: int
    kept_turn_bytes: int  # at the turn if no block runs again
    end_bytes: int


def rehearse(blocks: Sequence[BlockSizes], sizes: PassSizes, limit_bytes: int) -> list[str]:
    """The policies of the blocks, in order, once the headroom decides as it did in the pass before."""
    device = _CountedDevice(sizes.start_bytes)
    headroom = Headroom(device, limit_bytes, len(blocks), has_host_room=lambda _: True)
    before: list[str] = []
    with torch.enable_grad():
        for _ in range(MOST_PASSES):
            policies = _run_pass(headroom, device, blocks, sizes)
            if policies == before:
                break
            before = policies
    return before


class _CountedDevice:
    """A device of which only the bytes exist."""

    def __init__(self, start_bytes: int) -> None:
        self.now = self.peak = start_bytes

    def allocated_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak

    def forget_peak(self) -> None:
        self.peak = self.now

    def reach(self, num_bytes: int) -> None:
        """The allocator has come to `num_bytes` meanwhile."""
        self.peak = max(self.peak, num_bytes)


def _run_pass(headroom: Headroom, device: _CountedDevice, blocks: Sequence[BlockSizes], sizes: PassSizes) -> list[str]:
    """One forward and backward, as blocks and autograd drive a headroom."""
    headroom.begin()
    policies: list[str] = []
    first: torch.Tensor | None = None
    for block in blocks:
        policy = headroom.choose((torch.empty(max(1, block.input_bytes), dtype=torch.uint8, device="meta"),))
        device.now += {"keep": block.kept_bytes, "recompute": block.input_bytes, "host": 0}[policy]
        device.reach(device.now)
        output = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True) * 1
        headroom.note(output, kept=policy == "keep")
        first = output if first is None else first
        policies.append(policy)
    keeps_all = set(policies) == {"keep"}
    device.reach(device.now + (sizes.kept_turn_bytes if keeps_all else sizes.turn_bytes))
    device.reach(sizes.start_bytes + sizes.end_bytes)
    if first is not None:
        first.backward()
    device.now = sizes.start_bytes
    return policies
