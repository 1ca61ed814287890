"""A rank of the pool as a launcher would have started it: the environment that frameworks read, and fresh state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """Inside, the environment is torchrun's, and Accelerate's singletons belong only to this job."""
    before = {name: os.environ.get(name) for name in NAMES}
    if world_size > 1:
        values = (rank, world_size, rank, world_size, "127.0.0.1", 1)  # the group is already there: nobody connects
        os.environ.update(zip(NAMES, map(str, values), strict=True))
    _reset_accelerate()
    try:
        yield
    finally:
        _reset_accelerate()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _reset_accelerate() -> None:
    if find_spec("accelerate") is None:
        return
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(False)
    PartialState._reset_state()
    GradientState._reset_state()
