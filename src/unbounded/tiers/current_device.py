"""The GPU of a model made the current one, for as long as something is done to the model.

A thread begins with the first GPU as its current one, and a model may be on another. Torch's own operations go where
their tensors are. Events, streams that nobody names, and Triton's kernels go to the current device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the current one of this thread; afterwards, the one before is again."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)
