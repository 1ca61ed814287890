"""The collectives of one axis of ranks: how shards become whole buffers and gradients become shards.

The only module that calls torch.distributed, so that renamed functions, deprecations and counting live in one
place. One rank is the degenerate case: no process group, and every call a copy or nothing.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unbounded.errors import CheckpointError, DiskError, PlanError, StateError
from unbounded.observe import trace

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# How long a rank waits for others at a gather that the agreed order does not have.
MEETING_SECONDS = 30


class Ranks:
    """The ranks of one axis. `lane` makes a second set with a communicator of its own, to run beside this one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        active = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if active else 1
        self.rank = dist.get_rank(group) if active else 0
        self._words: dist.ProcessGroup | None = None

    def lane(self, backend: str | None = None) -> Ranks:
        """All ranks of the axis must call this. With "gloo" the lane is on the host and disturbs no device."""
        if self.size == 1:
            return self
        return Ranks(dist.new_group(self._members(), backend=backend))

    def gather(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        """All ranks of the axis must call this. Fills `full` with every rank's `shard`."""
        with trace.device_span("gather", name, bytes=full.numel() * full.element_size()):
            if self.size == 1:
                full.copy_(shard)
            else:
                _gather(full, shard.contiguous(), group=self.group)

    def reduce(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        """All ranks of the axis must call this. `shard` becomes this rank's part of the mean of all `full`."""
        with trace.device_span("reduce", name, bytes=full.numel() * full.element_size()):
            if self.size == 1:
                shard.copy_(full)
            elif full.device.type == "cuda":
                _scatter(shard, full, op=dist.ReduceOp.AVG, group=self.group)
            else:
                shard.copy_(self._sum_in_rank_order(full).div_(self.size))

    def _members(self) -> list[int]:
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def _sum_in_rank_order(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of all `full`, in fp32 or wider.

        gloo's reduce-scatter adds in an order that depends on an element's place in the buffer, so results would
        depend on how parameters are cut into units. The same bytes exchanged and added here do not.
        """
        parts = torch.empty_like(full)
        dist.all_to_all_single(parts, full, group=self.group)
        rows = parts.view(self.size, -1)
        total = rows[0].to(torch.promote_types(full.dtype, torch.float32), copy=True)
        for row in rows[1:]:
            total.add_(row)
        return total

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks of the axis must call this. Adds up `tensor` in place over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks of the axis must call this. The elementwise maximum in place over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks of the axis must call this. Everyone gets the first rank's `tensor`."""
        if self.size > 1:
            dist.broadcast(tensor, src=self._first(), group=self.group)
        return tensor

    def _first(self) -> int:
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def objects(self, value: Any) -> list[Any]:
        """All ranks of the axis must call this. Every rank's `value`, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """All ranks of the axis must call this. Every rank's `value`; if any has an error, all of them raise one."""
        told = self.objects((value, None if error is None else _describe(error)))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(told):
            if failure is not None:
                raise _error_of_peer(rank, *failure)
        return [value for value, _ in told]

    def open_words(self) -> None:
        """All ranks of the axis must call this. Makes the group over which `rendezvous` asks, with its time limit."""
        if self.size > 1:
            self._words = dist.new_group(self._members(), backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

    def rendezvous(self, name: str) -> None:
        """All ranks of the axis must call this. Raises where the others are not about to gather `name` too."""
        if self.size == 1:
            return
        names: list[Any] = [name] * self.size
        try:
            dist.all_gather_object(names, name, group=self._words)
        except RuntimeError as error:
            raise StateError(
                f"rank {self.rank} needs the parameters of unit {name!r}, which no other rank has come to within "
                f"{MEETING_SECONDS} s. Use a parameter outside the model's forward on every rank, or inside "
                "`with unbounded.full_params(model):`, and call partitioned blocks equally often on every rank."
            ) from error
        if len(set(names)) > 1:
            raise StateError(
                f"the ranks need different units at the same time: {', '.join(map(repr, names))}. Call partitioned "
                "blocks equally often on every rank, or use stage 2, which keeps weights whole."
            )

    def check_same(self, value: str, what: str) -> None:
        """All ranks of the axis must call this. Raises on every rank unless `value` is the same on all."""
        marks = self.objects(zlib.crc32(value.encode()))
        for rank, mark in enumerate(marks):
            if mark != marks[0]:
                raise PlanError(
                    f"rank {rank} has another {what} than rank 0. Build the same {what} on every rank, "
                    "in the same order."
                )


def _describe(error: Exception) -> tuple[str, str, int | None, str | None]:
    number = error.errno if isinstance(error, OSError) else None
    path = error.filename if isinstance(error, OSError) else None
    return type(error).__name__, str(error), number, None if path is None else str(path)


def _error_of_peer(rank: int, kind: str, text: str, number: int | None, path: str | None) -> Exception:
    """What the others raise where one rank failed: a DiskError with path and errno where its was one."""
    if kind == DiskError.__name__:
        error = DiskError(f"rank {rank} failed: {text}")
        error.errno, error.filename = number, path
        return error
    return (CheckpointError if kind == CheckpointError.__name__ else StateError)(f"rank {rank} failed: {kind}: {text}")
