"""`deepspeed.utils`: the logger, what is in use of memory, and weights from checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unbounded.deepspeed.accelerator import get_accelerator
from unbounded.deepspeed.comm import get_rank
from unbounded.deepspeed.utils import zero_to_fp32
from unbounded.tiers.driver import resident_bytes

logger = logging.getLogger("unbounded")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs `message` on these ranks; without them, or with -1 among them, on all."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """With `force`, logs what is in use of the device and of the host, in GiB."""
    if force:
        device = get_accelerator()
        sizes = (
            device.memory_allocated(),
            device.max_memory_allocated(),
            device.memory_reserved(),
            device.max_memory_reserved(),
            resident_bytes(),
        )
        used = "allocated {:.2f} (most {:.2f}), reserved {:.2f} (most {:.2f}) of the device, {:.2f} GiB of the host"
        log_dist(f"{message}: {used.format(*(size / 2**30 for size in sizes))}", ranks)


__all__ = ["get_accelerator", "log_dist", "logger", "see_memory_usage", "zero_to_fp32"]
