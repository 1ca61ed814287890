"""One training step after another: batches in, updates, numbers out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unbounded.train.data.heldout import share
from unbounded.train.data.loader import Batch
from unbounded.train.data.stream import Sequence
from unbounded.train.objective import summed_loss
from unbounded.train.settings import Settings
from unbounded.train.world import World


@dataclass(frozen=True)
class Outcome:
    """What a step did, the same on all ranks: `loss` is the mean over the global batch's targets."""

    loss: float
    norm: float
    num_targets: int
    stepped: bool
    seconds: float
    votes: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient's norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Trainer:
    """Runs steps of a sharded model. All ranks must call its methods together."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, settings: Settings, world: World) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.settings, self.world = settings, world
        self.broken_units: list[str] = []  # units whose gradient was not finite in the last step that was left out

    def step(self, number: int, batch: Batch, vote: Callable[[], tuple[float, ...]] = tuple) -> Outcome:
        """Train on a global batch; what `vote` gives behind the backward pass is summed over ranks with the loss.

        Loss and gradient are means over the targets of the whole batch, on however many ranks and in however many
        parts it is run: each rank's sum is divided by the global count, times the ranks over which the engine averages.
        """
        start = time.perf_counter()
        self._seed(number)
        num_targets = max(int(self.world.sum([batch.num_targets])[0]), 1)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for inputs, targets in self._parts(batch):
            loss = summed_loss(self.model, inputs, targets)
            self.optimizer.scale(loss * (self.world.size / num_targets)).backward()
            total = total + loss.detach().double()
        norm = float(self.optimizer.clip_grad_norm_(self.settings.clip or math.inf))
        summed, *votes = self.world.sum([float(total), *vote()])
        outcome = Outcome(summed / num_targets, norm, num_targets, True, 0.0, tuple(votes))
        stepped = self._update(outcome)
        seconds = time.perf_counter() - start
        return Outcome(outcome.loss, norm, num_targets, stepped, seconds, tuple(votes))

    def _update(self, outcome: Outcome) -> bool:
        """Step, unless the loss or gradient is not finite. (In fp16 the optimizer itself judges the gradient.)"""
        judged = outcome.loss if self.settings.precision == "fp16" else outcome.loss + outcome.norm
        stepped = math.isfinite(judged)
        if stepped:
            self.optimizer.step()
            self.scheduler.step()
        else:
            self.broken_units = self.optimizer.nonfinite_units()
        self.optimizer.zero_grad()
        return stepped

    def evaluate(self, sequences: list[Sequence]) -> float:
        """The mean loss over the held-out targets."""
        self.model.eval()
        summed, count = 0.0, 0
        rows = self.settings.micro_batch
        with torch.no_grad():
            for batch in share(sequences, rows=rows, rank=self.world.rank, world_size=self.world.size):
                inputs, targets = self._move(batch.inputs, batch.targets)
                summed += float(summed_loss(self.model, inputs, targets))
                count += batch.num_targets
        self.model.train()
        total, targets_seen = self.world.sum([summed, count])
        return total / max(targets_seen, 1.0)

    def _parts(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.settings.micro_batch
        for start in range(0, len(batch.inputs), size):
            yield self._move(batch.inputs[start : start + size], batch.targets[start : start + size])

    def _move(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        device = self.world.device
        return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)

    def _seed(self, number: int) -> None:
        """Dropout's randomness depends on seed, step and rank alone, so that a resumed run repeats it."""
        torch.manual_seed((self.settings.seed * 1_000_003 + number) * 65_537 + self.world.rank)


def find_culprit(model: nn.Module, inputs: Tensor) -> str | None:
    """All ranks must call this: the first module whose output on `inputs` is not finite, by name."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            found.append(names[module])

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.no_grad():
            model(input_ids=inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
