"""One training step after another: batches in, updates, numbers out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unbounded.errors import DataError
from unbounded.observe import trace
from unbounded.observe.lanes import PASS, STEP
from unbounded.train.data.heldout import share
from unbounded.train.data.loader import Batch
from unbounded.train.data.sample import Sequence
from unbounded.train.data.tokenizer import IGNORED
from unbounded.train.options.settings import Settings
from unbounded.train.step.objective import MicroBatch, logits_of, summed_loss
from unbounded.train.step.staged import StagedModel
from unbounded.train.world import World


@dataclass(frozen=True)
class Outcome:
    """What a step did, the same on all ranks: `loss` is the mean over the global batch's targets."""

    loss: float
    norm: float
    num_targets: int
    stepped: bool
    lr: float
    sequence_length: int
    seconds: float
    votes: tuple[float, ...]


class Trainer:
    """Runs steps of a sharded model. All ranks must call its methods together."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, settings: Settings, world: World) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.settings, self.world = settings, world
        self.staged = StagedModel(model) if world.axes.pipeline.size > 1 else None
        self.broken_units: list[str] = []  # units whose gradient was not finite in the last skipped step

    def step(self, number: int, batch: Batch, vote: Callable[[], tuple[float, ...]] = tuple) -> Outcome:
        """Train on a global batch; what `vote` gives after the backward pass is summed over ranks with the loss.

        Loss and gradient are means over the targets of the whole batch, on however many ranks and in however many
        parts it runs. Each rank's sum is divided by the global count, times the ranks that the engine averages over.
        """
        with trace.mark(STEP, f"step {number + 1}"):
            return self._step(number, batch, vote)

    def _step(self, number: int, batch: Batch, vote: Callable[[], tuple[float, ...]]) -> Outcome:
        start = time.perf_counter()
        self._seed(number)
        num_targets = int(self.world.sum([batch.num_targets])[0])
        length = self.settings.length_at(number)
        if num_targets == 0 and number == 0:
            raise DataError(
                f"the {self.settings.batch_tokens} tokens of the first step have nothing to predict: they are prompts "
                f"without their answers, or special tokens. Look at the data, or raise --sequence-length ({length}) or "
                "--batch-tokens."
            )
        num_targets = max(num_targets, 1)
        total = self._run(batch, length, self.world.data.size / num_targets)
        norm = float(self.optimizer.clip_grad_norm_(math.inf))
        if self.settings.clip and math.isfinite(norm):  # otherwise a NaN would spread to the units that have none
            self.optimizer.clip_grad_norm_(self.settings.clip)
        (summed,) = self.world.sum([float(total)])
        votes = self.world.sum_all(vote())
        lr = float(self.optimizer.param_groups[0]["lr"])
        stepped = self._update(summed / num_targets, norm)
        seconds = time.perf_counter() - start
        return Outcome(summed / num_targets, norm, num_targets, stepped, lr, length, seconds, tuple(votes))

    def _run(self, batch: Batch, length: int, factor: float) -> Tensor:
        """The summed loss of this rank's batch; the gradient of `factor` times it is left in the model."""
        if self.staged is not None:
            with trace.mark(PASS, "pipeline"):
                return self.staged.summed_loss(self._whole(batch, length), factor)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for part in self._parts(batch, length):
            with trace.mark(PASS, "forward"):
                loss = summed_loss(self.model, part)
            with trace.mark(PASS, "backward"):
                self.optimizer.scale(loss * factor).backward()
            total = total + loss.detach().double()
        return total

    def _update(self, loss: float, norm: float) -> bool:
        """Step, unless the loss or gradient is not finite. (In fp16 the optimizer itself judges the gradient.)"""
        judged = loss if self.settings.precision == "fp16" else loss + norm
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
        rows = self.settings.rows // self.world.data.size if self.staged is not None else self.settings.micro_batch
        with torch.no_grad():
            for batch in share(sequences, rows=rows, rank=self.world.data.rank, num_ranks=self.world.data.size):
                whole = self._whole(batch, self.settings.sequence_length)
                run = self.staged.summed_loss if self.staged is not None else partial(summed_loss, self.model)
                summed += float(run(whole))
                count += batch.num_targets
        self.model.train()
        total, targets_seen = self.world.sum([summed, count])
        return total / max(targets_seen, 1.0)

    def _parts(self, batch: Batch, length: int) -> Iterator[MicroBatch]:
        """The batch in parts of about equal numbers of tokens, with rows of `length`."""
        size = self.settings.micro_batch * self.settings.sequence_length // length
        for at in range(0, batch.inputs.size // length, size):
            yield self._cut(batch, length, slice(at, at + size))

    def _whole(self, batch: Batch, length: int) -> MicroBatch:
        return self._cut(batch, length, slice(None))

    def _cut(self, batch: Batch, length: int, rows: slice) -> MicroBatch:
        inputs, targets = batch.inputs.reshape(-1, length)[rows], batch.targets.reshape(-1, length)[rows]
        positions = None
        if self.settings.packing == "separated":
            positions = self._move(count_positions(batch.starts.reshape(-1, length)[rows]))
        places = None
        if self.settings.objective == "masked" and self.staged is None:
            places = self._move(np.flatnonzero(targets != IGNORED))
        return MicroBatch(self._move(inputs), self._move(targets), positions, places)

    def _move(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.world.device)

    def _seed(self, number: int) -> None:
        """Dropout depends only on seed, step and data rank, so a resumed run repeats it."""
        torch.manual_seed(((self.settings.seed * 1_000_003 + number) * 65_537 + self.world.data.rank) % 2**63)


def count_positions(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions that start at 0 in every row and in every document."""
    index = np.broadcast_to(np.arange(starts.shape[1]), starts.shape)
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def find_culprit(model: nn.Module, inputs: Tensor) -> str | None:
    """All ranks must call this. The name of the first module whose output on `inputs` is not finite."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            found.append(names[module])

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.no_grad():
            logits_of(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
