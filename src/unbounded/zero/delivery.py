"""New weights on the short way: from an update straight to where a pass waits for them.

An update that runs on the device, or that brings weights from disk, has the new ones in a buffer when it writes them to
their tier. A fetch that waits for that update has memory for them. So the update puts them there, and they are not
brought again:

    update   | u3: states up | kernel | states down
    delivery                          | u3 |
    forward                                | u3 |

The fetch brings what was not delivered: parameters without a gradient, and what was updated before it began to wait.
"""

from __future__ import annotations

from collections.abc import Iterable

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

    def missing(self, stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of these, in order, is not filled; neighbours are joined."""
        found: list[tuple[int, int]] = []
        for start, stop in stretches:
            for low, high in [*sorted(self._filled), (stop, stop)]:
                if start < min(low, stop):
                    if found and found[-1][1] == start:
                        found[-1] = found[-1][0], min(low, stop)
                    else:
                        found.append((start, min(low, stop)))
                start = max(start, high)
        return found
