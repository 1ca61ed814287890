"""Counts what the engine does: bytes that are alive, bytes that go between ranks, lines of Python that run."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import unbounded
from unbounded.native.bulk import Backing

PACKAGE = str(Path(unbounded.__file__).parent)
WATCHDOG = f"{PACKAGE}/ranks/watchdog/"


def live_bytes() -> int:
    """Bytes of memory under all tensors that Python can reach, each byte once."""
    spans, things = [], gc.get_objects()
    hidden = {thing.storage.data_ptr() for thing in things if type(thing) is Backing and not thing.is_there}
    for thing in things:
        if issubclass(type(thing), torch.Tensor) and type(thing).__name__ != "FakeTensor" and not _is_meta(thing):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in hidden:
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total, reached = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def settled_bytes() -> int:
    """`live_bytes` once work in flight on other threads is done and they hold nothing of it."""
    gc.collect()
    seen = [live_bytes()]
    while len(seen) < 12 or (len(seen) < 1200 and len(set(seen[-12:])) > 1):
        time.sleep(0.02)
        seen.append(live_bytes())
    return seen[-1]


def _is_meta(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.is_meta or tensor.layout is not torch.strided


# Elements that every rank has to send for a buffer of n elements, in units of n (N - 1) / N.
_WEIGHTS = {
    "all_gather_into_tensor": (1, 0),
    "all_gather_single": (1, 0),
    "reduce_scatter_tensor": (1, 1),
    "reduce_scatter_single": (1, 1),
    "all_to_all_single": (1, 1),
    "all_reduce": (2, 0),
    "broadcast": (1, 0),
}


class Traffic:
    """Elements moved by each collective, counted as the papers do: a gather of n is n, an all-reduce 2n."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()  # lanes count too

    @property
    def total(self) -> int:
        return sum(self.elements.values())

    def clear(self) -> None:
        self.elements.clear()
        self.calls.clear()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        weight, position = _WEIGHTS[name]

        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position] if len(args) > position else next(iter(kwargs.values()))
            with self._lock:
                self.elements[name] += weight * tensor.numel()
                self.calls[name] += 1
            return function(*args, **kwargs)

        return counted


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Counts every collective that the engine's one module of collectives calls."""
    from unbounded.ranks import axis as collectives

    traffic = Traffic()
    proxy = type("Counted", (), {"__getattr__": lambda _, name: getattr(dist, name)})()
    for name in _WEIGHTS:
        if hasattr(dist, name):
            setattr(proxy, name, traffic.wrap(name, getattr(dist, name)))
    kept = {name: getattr(collectives, name) for name in vars(collectives)}
    for name, value in kept.items():
        if value is dist:
            setattr(collectives, name, proxy)
        elif callable(value) and getattr(dist, getattr(value, "__name__", ""), None) is value:
            setattr(collectives, name, getattr(proxy, value.__name__))
    try:
        yield traffic
    finally:
        for name, value in kept.items():
            setattr(collectives, name, value)


class Lines:
    """Lines of the package's own Python that ran, on every thread started inside `watched_lines`.

    Those of the watchdog are left out: it runs by the clock.
    """

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.active = False

    @property
    def total(self) -> int:
        return sum(self.count.values())

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.startswith(WATCHDOG):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.active and event == "line":
            self.count[f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_code.co_name}"] += 1
        return self._line


@contextmanager
def watched_lines() -> Iterator[Lines]:
    """Traces this thread and those started inside; counts while `lines.active`."""
    lines = Lines()
    before = sys.gettrace()
    threading.settrace(lines.trace)
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
