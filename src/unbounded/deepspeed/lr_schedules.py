"""DeepSpeed's learning rate schedules, which configs name: a logarithmic or linear warm-up, then a decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unbounded.errors import PlanError


class WarmupLR:
    """From `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise PlanError(f'warmup_type is {warmup_type!r}. It may be "log" or "linear".')
        self.optimizer, self.warmup_type = optimizer, warmup_type
        groups = optimizer.param_groups
        self.lowest = _for_groups("warmup_min_lr", warmup_min_lr, len(groups))
        highest = [group["lr"] for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.highest = _for_groups("warmup_max_lr", highest, len(groups))
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def get_lr(self) -> list[float]:
        part = self._part() if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = self.get_lr()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def _part(self) -> float:
        """How far between the lowest and the highest rate this step is."""
        return self._warmed() if self.last_batch_iteration < self.warmup_num_steps else self._after()

    def _warmed(self) -> float:
        if self.warmup_type == "log":
            return math.log(self.last_batch_iteration + 1) / math.log(self.warmup_num_steps)
        return self.last_batch_iteration / self.warmup_num_steps

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A warm-up, then a line down to the lowest rate at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = int(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(WarmupLR):
    """A warm-up to the optimizer's own rates, then half a cosine down to `cos_min_ratio` of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps, self.cos_min_ratio = int(total_num_steps), cos_min_ratio
        self.warmup_min_ratio = warmup_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def _warmed(self) -> float:
        return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * super()._warmed()

    def _after(self) -> float:
        progress = (self.last_batch_iteration - self.warmup_num_steps + 1) / max(
            1, self.total_num_steps - self.warmup_num_steps
        )
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def _for_groups(name: str, rates: float | Sequence[float], number: int) -> list[float]:
    """One rate for each param group: the same for all, or as many as there are groups."""
    if not isinstance(rates, (list, tuple)):
        return [rates] * number  # type: ignore[list-item]
    if len(rates) != number:
        raise PlanError(f"{name} has {len(rates)} values for {number} param groups. Give one value, or one for each.")
    return list(rates)


SCHEDULES: Mapping[str, Any] = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def build_schedule(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that a config names: DeepSpeed's, or one of torch.optim.lr_scheduler."""
    kind = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        raise PlanError(f"scheduler.type is {name!r}. It may be {', '.join(SCHEDULES)}, or one of torch's.")
    try:
        return kind(optimizer, **params)
    except PlanError:
        raise
    except (TypeError, ValueError) as error:
        raise PlanError(f"the scheduler {name} cannot be made from scheduler.params: {error}.") from None
