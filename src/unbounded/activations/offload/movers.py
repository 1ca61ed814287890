"""How activations move: on a GPU on two streams of their own, on a CPU by an immediate copy.

    compute   | block 0 | block 1 | block 2 | ... | block 2 again, backward | block 1 again, backward |
    out            | 0 |     | 1 |     | 2 |
    back                                          | 1 |                     | 0 |

No call waits for the device. The memory that a copy reads or writes belongs to the computing stream. It is freed only
after that stream was told to wait for the copy, so its next user runs after the copy.
"""

from __future__ import annotations

from typing import Protocol

import torch

from unbounded.observe import trace
from unbounded.observe.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE

Event = torch.cuda.Event | None


class Arrival(Protocol):
    """Values being copied back to the device."""

    @property
    def event(self) -> Event: ...

    def order_stream(self) -> torch.Tensor: ...


class Mover(Protocol):
    """Copies between one device and the host."""

    def mark(self) -> Event: ...

    def send(self, source: torch.Tensor, target: torch.Tensor, *, after: tuple[Event, ...]) -> Event: ...

    def bring(self, source: torch.Tensor, *, after: Event) -> Arrival: ...

    def give_up(self, sent: Event) -> None: ...


class HostMover:
    """For a CPU as the device."""

    def mark(self) -> Event:
        return None

    def send(self, source: torch.Tensor, target: torch.Tensor, *, after: tuple[Event, ...]) -> Event:
        with trace.span(DEVICE_TO_HOST, "activations", bytes=source.nbytes):
            target.copy_(source)
        return None

    def bring(self, source: torch.Tensor, *, after: Event) -> Arrival:
        with trace.span(HOST_TO_DEVICE, "activations", bytes=source.nbytes):
            return _Here(source.clone())

    def give_up(self, sent: Event) -> None:
        pass


class CudaMover:
    """For a GPU as the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> Event:
        """An event after what the computing stream has been given so far."""
        return _record(torch.cuda.current_stream(self.device))

    def send(self, source: torch.Tensor, target: torch.Tensor, *, after: tuple[Event, ...]) -> Event:
        """Copies to the host after these events. The source must live until `give_up`."""
        for event in after:
            if event is not None:
                self._out.wait_event(event)
        with torch.cuda.stream(self._out), trace.device_span(DEVICE_TO_HOST, "activations", bytes=source.nbytes):
            target.copy_(source, non_blocking=True)
        return _record(self._out)

    def bring(self, source: torch.Tensor, *, after: Event) -> Arrival:
        """Copies to memory of the computing stream, after its queued work: one block ahead of its use."""
        stream = torch.cuda.current_stream(self.device)
        target = torch.empty_like(source, device=self.device)
        self._back.wait_event(_record(stream))
        if after is not None:
            self._back.wait_event(after)
        with torch.cuda.stream(self._back), trace.device_span(HOST_TO_DEVICE, "activations", bytes=source.nbytes):
            target.copy_(source, non_blocking=True)
        return _Coming(target, _record(self._back), stream)

    def give_up(self, sent: Event) -> None:
        """Called before the source of a `send` is dropped."""
        if sent is not None:
            torch.cuda.current_stream(self.device).wait_event(sent)


def make_mover(device: torch.device) -> Mover:
    return CudaMover(device) if device.type == "cuda" else HostMover()


class _Here:
    """Values that have arrived."""

    event: Event = None

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def order_stream(self) -> torch.Tensor:
        return self._target


class _Coming:
    """Values that a stream is bringing. If they are dropped unused, nobody writes to their memory before it is done."""

    def __init__(self, target: torch.Tensor, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self._target, self.event, self._stream = target, event, stream

    def order_stream(self) -> torch.Tensor:
        torch.cuda.current_stream(self._target.device).wait_event(self.event)
        return self._target

    def __del__(self) -> None:
        self._stream.wait_event(self.event)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
