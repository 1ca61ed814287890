"""The stream that a model was used on last: use on another one goes on after it.

Users run forwards, backwards and evaluations on streams of their own, and models have some inside. In plain PyTorch
such streams need not wait for one another where all of them only read weights. Here weights come and go, gradients are
added up, and whoever brings or frees them orders that with one stream alone.
"""

from __future__ import annotations

import torch

from unbounded.zero.passes.capture import is_capturing


class Trail:
    """Of one model, or of one backward. On a CPU there are no streams, and nothing is done."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def follow(self, device: torch.device) -> None:
        """From now on the current stream is the last one, and waits for what the one before was given.

        In a graph that is being captured it cannot wait for work outside, all of which torch lets end before.
        """
        if device.type != "cuda" or self.is_current(device):
            return
        before, self.stream = self.stream, torch.cuda.current_stream(device)
        if before is not None and not is_capturing(device):
            self.stream.wait_stream(before)

    def is_current(self, device: torch.device) -> bool:
        """Whether the current stream is the last one. Torch's own way to ask takes as long as a launch."""
        current = torch._C._cuda_getCurrentRawStream(device.index)
        return self.stream is not None and self.stream.cuda_stream == current

    def end(self) -> None:
        """What comes next waits for nothing."""
        self.stream = None
