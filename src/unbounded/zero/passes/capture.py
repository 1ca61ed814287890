"""CUDA graphs: what they replay, nobody in Python hears of."""

from __future__ import annotations

import torch

from unbounded.errors import StateError


def refuse_capture(what: str, device: torch.device) -> None:
    """Raises where replays would go past the engine: it counts steps, and knows which gradients there are."""
    if is_capturing(device):
        raise StateError(
            f"{what} of a sharded model runs while a CUDA graph is being captured. Its replays would go past the "
            "engine, which would not see their gradients and could not give each step its own numbers. Train outside "
            "of the graph."
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the current stream goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
