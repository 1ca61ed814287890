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
# On a GPU that has not the 5.3 GiB for that.
NARROW = JobSize(16, 1024, 16, sequence_length=1024, batch_tokens=65_536, micro_tokens=8192, steps=75, lr=6e-4)
GIVEN = JobSize(0, 0, 0, sequence_length=1024, batch_tokens=16_384, micro_tokens=8192, steps=0, lr=2e-5)
LORA_LR = 2e-4
LARGE_DEVICE_BYTES = 7 << 30


def size_for(kind: str, *, is_given: bool, device_bytes: int) -> JobSize:
    """For the built-in GPT on a device of this kind and memory, or for a model that the user gives."""
    if is_given or kind == "cpu":
        return GIVEN if is_given else SMALL
    return LARGE if device_bytes >= LARGE_DEVICE_BYTES else NARROW


def show(name: str, *more: str) -> str:
    """The default of a field in words, with `more` after it."""
    small, large, narrow, given = (f"{getattr(size, name):g}" for size in (SMALL, LARGE, NARROW, GIVEN))
    words = [small, f"on a GPU, {large}"]
    if narrow != large:
        words.append(f"if that has less than {LARGE_DEVICE_BYTES >> 30} GiB, {narrow}")
    if given != "0":
        words.append(f"for a given model, {given}")
    return "; ".join([*words, *more])
