"""CUDA graphs: what they replay, nobody in Python hears of."""

from __future__ import annotations

import torch

from unbounded.errors import StateError


def refuse_capture(what: str, device: torch.device) -> None:
    """Raises, before CUDA does in words that name nothing, and leaves the generators of random numbers unusable."""
    if is_capturing(device):
        raise StateError(
            f"{what} of a sharded model runs while a CUDA graph is being captured. Its replays would go past the "
            "engine, which brings weights, collects gradients and gives each step its own numbers. Capture nothing "
            "but evaluations, and those only where all weights are on the device."
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the current stream goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
