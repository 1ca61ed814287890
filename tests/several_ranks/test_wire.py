"""Sends and receives between two ranks of an axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unbounded.ranks import wire
from unbounded.ranks.mesh import make_axes

CPU = torch.device("cpu")


def end_while_waiting(rank: int, size: int) -> tuple[bool, bool]:
    """Whether the thread that waits for what nobody sends is done before a program's end, and after it."""
    axis = make_axes(None, CPU, pipeline=size).pipeline.lane("a wire")
    before, after = False, True
    if rank == 0:
        waited = wire.Wire(axis)._hand_over(dist.irecv(torch.zeros(1), 1, group=axis.group))  # type: ignore[arg-type]
        before = waited.is_completed()
        wire._end_waits()
        after = waited.is_completed()
    dist.barrier()  # the other rank's end would end the wait as well
    return before, after


def test_a_program_does_not_end_while_a_thread_waits_inside_torch(ranks: Any) -> None:
    assert ranks(2, end_while_waiting) == [(False, True), (False, True)]
