"""Which units with states on the host are updated by the GPU instead, their states streamed through PCIe and back.

The arithmetic, per parameter with `exact` AdamW states: the host's kernel reads and writes 26 bytes of host memory;
streaming moves 14 bytes up and 12 down (gradient, weight, completion and moments up; all but the gradient back),
which are the same 26 bytes of host memory. So with enough cores to reach the memory's limit streaming gains
nothing, and with few cores it adds what the cores leave unused. Rates are per thread and per link, in parameters a
second, rounded down; the split is a pure function of the number of threads, so that two runs split alike.
"""

from __future__ import annotations

from collections.abc import Sequence

HOST_RATE_PER_THREAD = 0.35e9
HOST_RATE_LIMIT = 4.0e9  # memory-bound: about 110 GB/s over 26 bytes
STREAM_RATE = 3.0e9  # 45 GB/s each way over 14 bytes, both ways at once


def streamed_part(host_threads: int) -> float:
    """The part of the host's units to stream so that both finish together; 0 where the host needs no help."""
    host = min(host_threads * HOST_RATE_PER_THREAD, HOST_RATE_LIMIT)
    stream = min(STREAM_RATE, HOST_RATE_LIMIT - host)  # what the host's memory has left
    part = stream / (stream + host)
    return part if part >= 0.1 else 0.0


def choose_streamed(candidates: Sequence[bool], part: float) -> list[bool]:
    """Spreads the part evenly over the candidates, so that both sides advance through the model together."""
    chosen, seen = [], 0
    for candidate in candidates:
        seen += candidate
        chosen.append(bool(candidate and int(seen * part) > int((seen - 1) * part)))
    return chosen
