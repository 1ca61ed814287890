"""The output folder of a run: its checkpoints, one folder a step, the last few of them kept."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

import unbounded
from unbounded.train.world import World

_NAME = re.compile(r"step-(\d+)")
_FAREWELL_SECONDS = 30.0


class RunFolder:
    """Saves to, finds in and clears `root`. Its methods must be called by all ranks; the first rank alone removes."""

    def __init__(self, root: Path, world: World, keep_last: int) -> None:
        self.root, self._world, self._keep_last = root, world, keep_last
        self._stale: list[Path] = []
        self._pending: tuple[Path, Any] | None = None
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
        """Load the newest whole checkpoint and return its extra values; None where there is none.

        Hyper-parameters stay as the settings of this run have them.
        """
        given = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for step in self.steps():
            try:
                extra = unbounded.load(self.path_of(step), model, optimizer)
            except FileNotFoundError:
                continue  # torn by a kill
            for group, values in zip(optimizer.param_groups, given, strict=True):
                group.update(values)
            self.last = self.path_of(step)
            return extra
        return None

    def start_over(self) -> None:
        """Count the checkpoints that are there as an earlier run's: they go once this run has one of its own."""
        self._stale = [self.path_of(step) for step in self.steps()]

    def save(self, step: int, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> Path:
        """Begin to save a step; training may go on. It counts as saved, and older ones go, once `settle` has waited."""
        self.settle()
        path = self.path_of(step)
        self._pending = (path, unbounded.save(path, model, optimizer, wait=False, **extra))
        return path

    def find_last(self) -> Path | None:
        """The last whole checkpoint as far as this rank knows, for words of farewell: no other rank is asked."""
        if self._pending is None:
            return self.last
        path, handle = self._pending
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while not handle.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(Exception):
            if handle.done():
                handle.wait()
                self.last = path
        self._pending = None
        return self.last

    def settle(self) -> None:
        """Wait for the save under way, if there is one, and remove what is no longer to be kept."""
        if self._pending is None:
            return
        (path, handle), self._pending = self._pending, None
        handle.wait()
        self.last = path
        kept = [self.path_of(step) for step in self.steps() if self.path_of(step) not in self._stale]
        gone = [old for old in self._stale if old != path] + kept[self._keep_last :]
        self._stale = []
        if self._world.is_first:
            for old in gone:
                shutil.rmtree(old, ignore_errors=True)
