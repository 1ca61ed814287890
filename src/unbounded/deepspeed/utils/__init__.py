"""`deepspeed.utils`: the logger, what is in use of memory, loaders without an end, and weights from checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

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


class RepeatingLoader:
    """The batches of `loader`, and from the first one again when they are over."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self._batches = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        return next(self._batches)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes. Nothing else is done: modules that a pass skips need no mark."""
    wanted = set(leaf_module_classes)
    found = [module for module in model.modules() if not wanted.isdisjoint(_names(type(module)))]
    if not found and raise_if_not_found:
        raise ValueError(f"the model has no module of {sorted(map(str, wanted))}. Name classes that it has.")
    return found


def _names(kind: type) -> tuple[type | str, str, str]:
    return kind, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


__all__ = [
    "RepeatingLoader",
    "get_accelerator",
    "log_dist",
    "logger",
    "see_memory_usage",
    "set_z3_leaf_modules",
    "zero_to_fp32",
]
