"""What a job has where the user leaves it open, by machine and model. `--help` shows the same numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobSize:
    """Sizes of one kind of job; 0: not its own to choose."""

    layers: int
    width: int
    heads: int
    sequence_length: int
    batch_tokens: int
    micro_tokens: int  # about as many as a rank runs at once
    steps: int
    lr: float


SMALL = JobSize(6, 192, 6, sequence_length=128, batch_tokens=1024, micro_tokens=8192, steps=320, lr=1e-3)
# On a GPU: wide layers and many tokens at once, so that a step computes for longer than it launches or moves states.
LARGE = JobSize(8, 2048, 16, sequence_length=1024, batch_tokens=65_536, micro_tokens=16_384, steps=100, lr=4e-4)
GIVEN = JobSize(0, 0, 0, sequence_length=1024, batch_tokens=16_384, micro_tokens=8192, steps=0, lr=2e-5)
LORA_LR = 2e-4


def size_for(kind: str, *, is_given: bool) -> JobSize:
    """For the built-in GPT on a device of this kind, or for a model that the user gives."""
    return GIVEN if is_given else SMALL if kind == "cpu" else LARGE


def show(name: str, *more: str) -> str:
    """The default of a field in words, with `more` after it."""
    small, large, given = (getattr(size, name) for size in (SMALL, LARGE, GIVEN))
    words = [f"{small:g}" if isinstance(small, float) else f"{small}"]
    for value, where in ((large, "on a GPU"), (given, "for a given model")):
        if value:
            words.append(f"{where}, {value:g}" if isinstance(value, float) else f"{where}, {value}")
    return "; ".join([*words, *more])
