"""The output folder of a run: its checkpoints, one folder a step, the last few of them kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn

import unbounded
from unbounded.train.world import World

_NAME = re.compile(r"step-(\d+)")


class RunFolder:
    """Saves to, finds in and clears `root`. Its methods must be called by all ranks; the first rank alone removes."""

    def __init__(self, root: Path, world: World, keep_last: int) -> None:
        self.root, self._world, self._keep_last = root, world, keep_last
        self._stale: list[Path] = []
        self.last: Path | None = None

    def steps(self) -> list[int]:
        """The steps with a checkpoint folder, as the first rank sees them, newest first."""
        found = []
        if self._world.is_first and self.root.is_dir():
            found = [int(match[1]) for path in self.root.iterdir() if (match := _NAME.fullmatch(path.name))]
        steps: list[int] = self._world.collect(sorted(found, reverse=True))[0]
        return steps

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.root / f"step-{step:08}"

    def load(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        """Load the newest whole checkpoint and return its extra values; None where there is none."""
        for step in self.steps():
            try:
                extra = unbounded.load(self.path_of(step), model, optimizer)
            except FileNotFoundError:
                continue  # torn by a kill
            self.last = self.path_of(step)
            return extra
        return None

    def start_over(self) -> None:
        """Count the checkpoints that are there as an earlier run's: they go once this run has one of its own."""
        self._stale = [self.path_of(step) for step in self.steps()]

    def save(self, step: int, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> Path:
        """Save a step, then remove what is no longer to be kept."""
        path = self.path_of(step)
        unbounded.save(path, model, optimizer, **extra)
        self.last = path
        kept = [self.path_of(other) for other in self.steps() if self.path_of(other) not in self._stale]
        gone = [old for old in self._stale if old != path] + kept[self._keep_last :]
        self._stale = []
        if self._world.is_first:
            for old in gone:
                shutil.rmtree(old, ignore_errors=True)
        return path
