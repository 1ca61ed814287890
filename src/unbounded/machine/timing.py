"""How long work takes on a device, the first run aside: the least of a few runs, or what it takes when it goes on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPETITIONS = 5
# How long work goes on before its time is taken as what steps see. Clocks fall under load within a fraction of this.
# A CPU does so at three moments.
SUSTAINED_SECONDS = {"cuda": 1.5, "cpu": 1.0}


def least_seconds(work: Callable[[], object], device: torch.device, repetitions: int = REPETITIONS) -> float:
    """Of one run of `work` until the device has finished."""
    _timed(work, device)
    return min(_timed(work, device) for _ in range(repetitions))


def sustained_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one run of `work` among many: the median of those in the second half of the time."""
    _timed(work, device)
    began = time.perf_counter()
    taken: list[float] = []
    while len(taken) < REPETITIONS or time.perf_counter() - began < SUSTAINED_SECONDS[device.type]:
        taken.append(_timed(work, device))
    return statistics.median(taken[len(taken) // 2 :])


def _timed(work: Callable[[], object], device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
