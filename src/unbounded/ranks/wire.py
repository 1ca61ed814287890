"""What one rank of an axis sends to another, watched in the same way as collectives.

Between two ranks each direction is its own sequence: the sender's nth is the receiver's nth. gloo closes its
connections when a wait on one of them times out, so these waits have no limit: a thread waits, and the caller waits for
the thread, in slices.

    caller   receive | slice | slice ...... |          or, in slice after slice, the verdict
    waiter           | work.wait()          | done
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unbounded.ranks.axis import Axis
from unbounded.ranks.watchdog import watch
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.watch import Collective

# How long the end of a program stays for a thread whose connection was closed.
GIVE_UP_SECONDS = 5.0


class _Waited:
    """A send or a receive that a thread waits for. Waiting for the thread may time out and be repeated."""

    def __init__(self, work: Collective) -> None:
        self._work = work
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._is_over.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not over yet")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def give_up(self) -> None:
        """Ends the thread's wait by closing the connection, which is what gloo does if a wait on it times out."""
        if not self._is_over.is_set():
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))
            self._is_over.wait(GIVE_UP_SECONDS)


_handed_over: weakref.WeakSet[_Waited] = weakref.WeakSet()


@watch.at_end
def _end_waits() -> None:
    """A thread that is still inside torch when the interpreter ends would abort the process."""
    for waited in list(_handed_over):
        waited.give_up()


def _serve(waiting: queue.SimpleQueue[_Waited | None]) -> None:
    while (waited := waiting.get()) is not None:
        waited.run()


class Wire:
    """Sends and receives between this rank and others of an axis, in the order of the calls. One thread calls it."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._in_flight: list[tuple[Collective, torch.Tensor, Post | None, int]] = []
        self._waiting: queue.SimpleQueue[_Waited | None] | None = None

    def send(self, tensor: torch.Tensor, to: int, subject: str) -> None:
        """Sends a tensor to a rank of the axis. Returns at once; `finish` waits until it has left."""
        post = self._begin("the sending", subject, tensor, self.axis.rank, to)
        work = self._launch(dist.isend, tensor, to, post)
        if post is not None:
            post.end()  # nothing waits for it yet
        self._in_flight.append((work, tensor, post, 0 if post is None else post.begun))

    def receive(self, tensors: Sequence[torch.Tensor], source: int, subject: str) -> None:
        """Fills the tensors with what a rank of the axis sends next."""
        launched = []
        for tensor in tensors:
            post = self._begin("the receipt", subject, tensor, source, self.axis.rank)
            work = self._launch(dist.irecv, tensor, source, post)
            launched.append((work, post, 0 if post is None else post.begun))
        for work, post, number in launched:
            self._wait(work, post, number)

    def send_object(self, value: Any, to: int, subject: str, device: torch.device) -> None:
        """Sends what can be pickled; `device` is where this axis' tensors travel from."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        self.send(torch.tensor([data.numel()], dtype=torch.int64, device=device), to, subject)
        self.send(data, to, subject)

    def receive_object(self, source: int, subject: str, device: torch.device) -> Any:
        """What a rank of the axis has sent by `send_object`."""
        size = torch.zeros(1, dtype=torch.int64, device=device)
        self.receive([size], source, subject)
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
        self.receive([data], source, subject)
        return pickle.loads(data.cpu().numpy().tobytes())

    def finish(self) -> None:
        """Returns when everything sent has left."""
        in_flight, self._in_flight = self._in_flight, []
        for work, _, post, number in in_flight:
            if post is not None:
                post.reopen(number)
            self._wait(work, post, number)

    def _begin(self, operation: str, subject: str, tensor: torch.Tensor, source: int, to: int) -> Post | None:
        axis = self.axis
        if axis.watch is None or axis.group is None:
            return None
        members = [dist.get_global_rank(axis.group, rank) for rank in (source, to)]
        post = axis.watch.heartbeat.post(f"{axis.group.group_name}:{source}>{to}", members)
        post.begin(operation, subject, tensor.numel() * tensor.element_size())
        axis.watch.check(post)
        return post

    def _launch(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int, post: Post | None) -> Collective:
        group, watch = self.axis.group, self.axis.watch
        assert group is not None
        try:
            work: Collective = call(tensor, dist.get_global_rank(group, peer), group=group)
        except RuntimeError as error:  # the connection is closed already
            if watch is None or post is None:
                raise
            raise watch.explain(error, post) from error
        return work

    def _wait(self, work: Collective, post: Post | None, number: int) -> None:
        axis = self.axis
        if post is None or axis.watch is None or axis.group is None:
            work.wait()
        elif axis.is_on_device:
            start = torch.cuda.Event()
            start.record()
            work.wait()  # on the current stream
            axis.watch.follow(post, axis.limit, start)
        else:
            axis.watch.wait(self._hand_over(work), axis.group, post, axis.limit, number)

    def _hand_over(self, work: Collective) -> Collective:
        if self._waiting is None:
            self._waiting = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._waiting,), name="unbounded-wire", daemon=True).start()
            weakref.finalize(self, self._waiting.put, None).atexit = False
        waited = _Waited(work)
        _handed_over.add(waited)
        self._waiting.put(waited)
        return waited
