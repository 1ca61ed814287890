"""New weights on the short way: from an update straight to where a pass waits for them.

An update that runs on the device, or that brings weights from disk, has the new ones in a buffer when it writes them to
their tier. A fetch that waits for that update has memory for them. So the update puts them there, and they are not
brought again:

    update   | u3: states up | kernel | states down
    delivery                          | u3 |
    forward                                | u3 |

The fetch brings what was not delivered: pieces without a gradient, and those that were written before it began to wait.
"""

from __future__ import annotations

import torch

from unbounded.tiers.array import DeviceCopy


class Delivery:
    """Memory for the owned part of a unit's weights, and which stretches of it an update has filled.

    `ready` says when other streams may use the memory.
    """

    def __init__(self, part: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._part, self._ready = part, ready
        self._filled: list[tuple[int, int]] = []

    def put(self, weights: torch.Tensor, start: int) -> DeviceCopy | None:
        """Copies new weights to `start`, on the current stream; returns the copy if it is in flight."""
        stop = start + weights.numel()
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        self._part[start:stop].copy_(weights, non_blocking=True)
        self._filled.append((start, stop))
        return None if self._ready is None else DeviceCopy(torch.cuda.current_stream().record_event())

    def missing(self) -> list[tuple[int, int]]:
        """What is not filled. It begins and ends where pieces of an update do, so it can be read from a disk."""
        found, at = [], 0
        for start, stop in [*sorted(self._filled), (self._part.numel(), 0)]:
            if at < start:
                found.append((at, start))
            at = max(at, stop)
        return found
