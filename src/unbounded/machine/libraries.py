"""What a process takes of the host before it has a model: Python, torch, the driver's and this library's own code.

A process of its own is measured, which has trained one block: libraries take most of their memory when they are first
used. Whoever calls `Machine.measure()` may have loaded much more.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from unbounded.machine.block import MeasuredBlock
from unbounded.planner.models.shapes import Shape
from unbounded.tiers.driver import resident_bytes
from unbounded.zero.setup import assembly  # noqa: F401  (a job has the engine loaded)

_SECONDS = 60.0  # a process that takes longer is given up
_SHAPE, _ROWS, _SEQUENCE, _STEPS = Shape("tiny", 1, 256, 1, 4, 4, 704), 1, 64, 2


def measure_libraries() -> dict[str, int]:
    """`process_bytes`; 0 if no process can be started here."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return {"process_bytes": int(done.stdout)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"process_bytes": 0}


def train_block() -> None:
    """A few steps of a small block where models compute."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        block = MeasuredBlock(_SHAPE, _SEQUENCE).to(dtype)
        x = torch.randn(_ROWS, _SEQUENCE, _SHAPE.hidden, dtype=dtype)
    optimizer = torch.optim.AdamW(block.parameters())
    for _ in range(_STEPS):
        block(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train_block()
    print(resident_bytes())
