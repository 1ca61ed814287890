"""The collectives of one axis of ranks: how shards become whole buffers and gradients become shards.

Every collective that training makes goes through here, so that renamed functions, deprecations, counting and the
watchdog live in one place. One rank is the degenerate case: no process group, and every call a copy or nothing.
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unbounded import errors
from unbounded.errors import PlanError, StateError
from unbounded.native.bulk import convert, new_tensor
from unbounded.observe import trace
from unbounded.ranks.groups import GroupLease, take_lease
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.watch import LIMIT_SECONDS, Collective, Watch, keep_unfinished

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that was launched: `finish` returns when it is over. After an error it may never be called."""

    def __init__(self, axis: Axis, work: Collective | None, number: int) -> None:
        self._axis, self._work, self._number = axis, work, number
        self._abandon = weakref.finalize(self, keep_unfinished, work, axis.group)
        self._abandon.atexit = False

    def finish(self) -> None:
        self._abandon.detach()
        self._axis._end(self._work, self._number)


class Axis:
    """The ranks along one axis of the job: those of `group`, or only this one if it is None.

    `lane` makes a second axis of the same ranks with its own communicator, to run at the same time. `limit` is how many
    seconds the others may wait for a rank that runs its user's code (see `watchdog`).
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, watch: Watch | None = None) -> None:
        self.name, self.group, self.watch = name, group, watch
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.limit = LIMIT_SECONDS
        self._lease: GroupLease | None = None
        config = "" if group is None else str(dist.get_backend_config(group))
        self.is_on_device = "nccl" in config  # torch launches, and the device does the waiting
        self._host = torch.device("cuda") if self.is_on_device and "gloo" not in config else torch.device("cpu")
        self._start: torch.cuda.Event | None = None  # before the last collective on a device
        self._post = None if group is None or watch is None else watch.heartbeat.post(group.group_name, self.members())

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.rank} of {self.size})"

    def lane(self, purpose: str, backend: str | None = None) -> Axis:
        """All ranks of the axis must call this. With "gloo" the lane is on the host and disturbs no device.

        Its communicator belongs to this axis and `purpose` until the axis is freed; then the next axis uses it.
        """
        if self.group is None or self.size == 1:
            return self
        if self._lease is None:
            self._lease = take_lease(self.group.group_name, self.objects)
        lane = Axis(self.name, self._lease.group(purpose, self.members(), backend), self.watch)
        lane.limit, lane._lease = self.limit, self._lease
        return lane

    def members(self) -> list[int]:
        """The ranks of the axis, as the job numbers them."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def account(self) -> Post | None:
        """The record of what the ranks of the axis tell each other through the job's store, in one order."""
        if self.group is None or self.watch is None:
            return None
        return self.watch.heartbeat.post(f"account/{self.group.group_name}", self.members())

    # -- tensors ---------------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor, name: str, subject: str = "") -> None:
        """All ranks of the axis must call this. Fills `full` with every rank's `shard`.

        `name` is that of the span in a trace; `subject` says what is gathered, by default the unit of that name.
        """
        num_bytes = full.numel() * full.element_size()
        with trace.device_span("gather", name, bytes=num_bytes):
            if self.size == 1:
                full.copy_(shard)
                return
            self._begin("the gather", subject or f"unit {name!r}", num_bytes)
            self._end(self._launch(_gather, full, shard.contiguous()))

    def reduce(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        """All ranks of the axis must call this. `shard` becomes this rank's part of the mean of all `full`."""
        num_bytes = full.numel() * full.element_size()
        with trace.device_span("reduce", name, bytes=num_bytes):
            if self.size == 1:
                shard.copy_(full)
                return
            self._begin("the reduction", f"unit {name!r}", num_bytes)
            if full.device.type == "cuda":
                self._end(self._launch(_scatter, shard, full, op=dist.ReduceOp.AVG))
            else:
                shard.copy_(self._sum_in_rank_order(full).div_(self.size))

    def scatter(self, part: torch.Tensor, full: torch.Tensor, name: str, subject: str) -> None:
        """All ranks of the axis must call this. `part` becomes this rank's part of the sum of all `full`."""
        num_bytes = full.numel() * full.element_size()
        with trace.device_span("reduce", name, bytes=num_bytes):
            self._begin("the scattered sum", subject, num_bytes)
            if self.is_on_device:
                self._end(self._launch(_scatter, part, full))
            else:
                part.copy_(self._sum_in_rank_order(full))

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        name: str,
        subject: str,
        sizes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """All ranks of the axis must call this. Each rank gets its part of every rank's `sent`, in the order of ranks.

        Parts are equal, or `sizes` says what this rank gets from each rank, and what it sends to each.
        """
        num_bytes = sent.numel() * sent.element_size()
        given = {} if sizes is None else {"output_split_sizes": sizes[0], "input_split_sizes": sizes[1]}
        with trace.device_span("gather", name, bytes=num_bytes):
            self._begin("the exchange", subject, num_bytes)
            self._end(self._launch(dist.all_to_all_single, received, sent, **given))

    def _sum_in_rank_order(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of all `full`, in fp32 or wider.

        gloo's reduce-scatter adds in an order that depends on an element's place in the buffer, so results would
        depend on how parameters are divided into units. Exchanging the same bytes and adding them here does not.
        """
        parts = new_tensor(full.numel(), full.dtype, full.device)
        self._end(self._launch(dist.all_to_all_single, parts, full))
        rows = parts.view(self.size, -1)
        total = convert(rows[0], torch.promote_types(full.dtype, torch.float32), copy=True)
        for row in rows[1:]:
            total.add_(row)
        return total

    def sum(self, tensor: torch.Tensor, what: str = "the sum over ranks") -> torch.Tensor:
        """All ranks of the axis must call this. Adds up `tensor` in place over the ranks."""
        if self.size > 1:
            self._begin(what, num_bytes=tensor.numel() * tensor.element_size())
            self._end(self._launch(dist.all_reduce, tensor, op=dist.ReduceOp.SUM))
        return tensor

    def max(self, tensor: torch.Tensor, what: str = "the vote of the ranks") -> torch.Tensor:
        """All ranks of the axis must call this. The elementwise maximum in place over the ranks."""
        if self.size > 1:
            self._begin(what)
            self._end(self._launch(dist.all_reduce, tensor, op=dist.ReduceOp.MAX))
        return tensor

    def broadcast(self, tensor: torch.Tensor, what: str = "the broadcast of first values") -> torch.Tensor:
        """All ranks of the axis must call this. Everyone gets the first rank's `tensor`."""
        if self.size > 1:
            self._begin(what, num_bytes=tensor.numel() * tensor.element_size())
            self._end(self._launch(dist.broadcast, tensor, src=self.members()[0]))
        return tensor

    def launch_max(self, tensor: torch.Tensor, what: str) -> Pending:
        """All ranks of the axis must call this. Launches the `max` of a tensor on the host without waiting for it."""
        self._begin(what)
        number = 0 if self._post is None else self._post.begun
        return Pending(self, self._launch(dist.all_reduce, tensor, op=dist.ReduceOp.MAX), number)

    def _begin(self, operation: str, subject: str = "", num_bytes: int = 0) -> None:
        if self._post is not None and self.watch is not None:
            self._post.begin(operation, subject, num_bytes)
            self.watch.check(self._post)
            if self.is_on_device:
                self._start = torch.cuda.Event()
                self._start.record()

    def _launch(self, collective: Callable[..., Collective | None], *tensors: Any, **options: Any) -> Collective | None:
        """Torch waits by itself on a device, in the current stream."""
        return collective(*tensors, group=self.group, async_op=not self.is_on_device, **options)

    def _end(self, work: Collective | None, number: int | None = None) -> None:
        """Returns when the collective is over, or, on a device, when the current stream waits for it."""
        if self._post is None or self.watch is None:
            if work is not None:
                work.wait()
        elif work is None:
            assert self._start is not None
            self.watch.follow(self._post, self.limit, self._start)
        else:
            assert self.group is not None
            self.watch.wait(work, self.group, self._post, self.limit, number)

    # -- values ----------------------------------------------------------------------------------------------------

    def objects(self, value: Any, what: str = "an exchange of values") -> list[Any]:
        """All ranks of the axis must call this. Every rank's `value`, by rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._host)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._host)
        self._begin(what)
        self._end(self._launch(_gather, sizes, torch.tensor([data.numel()], dtype=torch.int64, device=self._host)))
        lengths = [int(size) for size in sizes.tolist()]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self._host)
        padded[: data.numel()] = data
        texts = torch.empty(self.size * padded.numel(), dtype=torch.uint8, device=self._host)
        self._begin(what, num_bytes=texts.numel())
        self._end(self._launch(_gather, texts, padded))
        rows = texts.view(self.size, -1).cpu()
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, error: Exception | None, value: Any = None, *, what: str) -> list[Any]:
        """All ranks of the axis must call this. Every rank's `value`; if any has an error, all of them raise.

        `what` is what they do together, for the message of who waits in it for a rank that does not come.
        """
        told = self.objects((value, None if error is None else _describe(error)), what)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(told):
            if failure is not None:
                raise _error_of_peer(rank, *failure)
        return [value for value, _ in told]

    def check_same(self, value: str, what: str) -> None:
        """All ranks of the axis must call this. Raises on every rank unless `value` is the same on all."""
        marks = self.objects(zlib.crc32(value.encode()), f"the comparison of every rank's {what}")
        for rank, mark in enumerate(marks):
            if mark != marks[0]:
                raise PlanError(
                    f"rank {rank} has a different {what} from rank 0. Build the same {what} on every rank, "
                    "in the same order."
                )


def is_running() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def _describe(error: Exception) -> tuple[str, str, int | None, str | None]:
    number = error.errno if isinstance(error, OSError) else None
    path = error.filename if isinstance(error, OSError) else None
    return type(error).__name__, str(error), number, None if path is None else str(path)


def _error_of_peer(rank: int, name: str, text: str, number: int | None, path: str | None) -> Exception:
    """What the others raise when one rank failed: the same error of ours with path and errno, or StateError."""
    kind = FileNotFoundError if name == "FileNotFoundError" else getattr(errors, name, None)
    if kind is None:
        return StateError(f"rank {rank} failed: {name}: {text}")
    error: Exception = kind(f"rank {rank} failed: {text}")
    if isinstance(error, OSError):
        error.errno, error.filename = number, path
    return error
