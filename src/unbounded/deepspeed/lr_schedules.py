"""DeepSpeed's learning rate schedules, which configs name: warm-ups with a decay, a cycle, and a range test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unbounded.errors import PlanError


class Schedule:
    """Sets the rates of every step from its number. A subclass says how, by `get_lr`."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        if last_batch_iteration == -1:
            self._set()

    def get_lr(self) -> list[float]:
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

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


class WarmupLR(Schedule):
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
        self.warmup_type = warmup_type
        groups = optimizer.param_groups
        self.lowest = _for_groups("warmup_min_lr", warmup_min_lr, len(groups))
        highest = [group["lr"] for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.highest = _for_groups("warmup_max_lr", highest, len(groups))
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        part = self._part() if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]

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


class LRRangeTest(Schedule):
    """From `lr_range_test_min_lr` up a line without an end, to see which rate is the highest that trains."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size < 1:
            raise PlanError(f"lr_range_test_step_size is {lr_range_test_step_size}, but it must be at least 1.")
        self.lowest = _for_groups("lr_range_test_min_lr", lr_range_test_min_lr, len(optimizer.param_groups))
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        sizes = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(sizes) if self.staircase else sizes)
        return [low * factor for low in self.lowest]


class OneCycle(Schedule):
    """Rates go up and down once, while the first beta goes down and up; then rates decay and the beta grows."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise PlanError(
                f"the halves of the cycle have {cycle_first_step_size} and {second} steps. Give cycle_first_step_size "
                "at least 1, and cycle_second_step_size at least 0."
            )
        number = len(optimizer.param_groups)
        self.lowest, self.highest = (
            _for_groups("cycle_min_lr", cycle_min_lr, number),
            _for_groups("cycle_max_lr", cycle_max_lr, number),
        )
        self.first, self.second = cycle_first_step_size, second
        up, down = cycle_first_stair_count, cycle_second_stair_count
        self.stairs = (up, up if down is None else down)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.least_momentum = _for_groups("cycle_min_mom", cycle_min_mom, number)
        self.most_momentum = _for_groups("cycle_max_mom", cycle_max_mom, number)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self._is_decaying:
            factor = 1 + self.decay_lr_rate * self._num_decays()
            return [low / factor for low in self.lowest]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.lowest, self.highest, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every group; None if they stay as they are."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:  # the first step has the least, before the way down from the most begins
            return [(least, 0.99) for least in self.least_momentum]
        if self._is_decaying:
            factor = 1 + self.decay_mom_rate * self._num_decays()
            return [(most * factor, 0.99) for most in self.most_momentum]
        height = self._height()
        pairs = zip(self.least_momentum, self.most_momentum, strict=True)
        return [(most - (most - least) * height, 0.99) for least, most in pairs]

    def _set(self) -> None:
        super()._set()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    @property
    def _is_decaying(self) -> bool:
        return self.last_batch_iteration >= self.first + self.second

    def _num_decays(self) -> float:
        over = self.last_batch_iteration - (self.first + self.second) + 1
        return over / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """How far up from the lowest rate to the highest the next step is."""
        done = (self.last_batch_iteration + 1) % (self.first + self.second)
        is_up = done <= self.first
        way, size = (done, self.first) if is_up else (self.first + self.second - done, self.second)
        stairs = self.stairs[0 if is_up else 1]
        return math.floor(way * stairs / size) / stairs if stairs > 0 else way / size


def _for_groups(name: str, rates: float | Sequence[float], number: int) -> list[float]:
    """One rate for each param group: the same for all, or as many as there are groups."""
    if not isinstance(rates, (list, tuple)):
        return [rates] * number  # type: ignore[list-item]
    if len(rates) != number:
        raise PlanError(f"{name} has {len(rates)} values for {number} param groups. Give one value, or one for each.")
    return list(rates)


KINDS = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
SCHEDULES: Mapping[str, Any] = {kind.__name__: kind for kind in KINDS}


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
