"""The random states of one rank: Python's, NumPy's, torch's and the GPU's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch


def take_random_states(device: torch.device) -> dict[str, Any]:
    import numpy

    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def check_random_states(states: Any, device: torch.device) -> None:
    """Raises if `restore_random_states` could not take these. They are tried on spare generators."""
    import numpy

    if not isinstance(states, Mapping):
        raise ValueError("they are not named")
    random.Random(0).setstate(states["python"])
    numpy.random.RandomState(0).set_state(states["numpy"])
    torch.Generator().set_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.Generator(device).set_state(states["cuda"])
