"""The output folder of a run: what it trains, and its last few checkpoints, one folder each.

    run.json             what the run trains; a start that trains something else is refused
    metrics.jsonl        see `unbounded.observe.metrics`
    step-00000100/       a checkpoint
    replaced-00000100/   a checkpoint of an earlier run; removed once this run has its own

A run that starts over renames the old checkpoints before its first step, so that no later start takes them for its
own, whatever happens to this one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbounded
from unbounded.checkpoint.format.folder import find
from unbounded.errors import InputError
from unbounded.observe.metrics import FILE_NAME as METRICS
from unbounded.observe.metrics import is_metrics
from unbounded.observe.replacing import write_file
from unbounded.train.world import World

RUN_FILE = "run.json"
_OURS = {"format": "unbounded run"}
_NAME = re.compile(r"(step|replaced)-(\d{1,18})")
_FAREWELL_SECONDS = 30.0
Description = dict[str, Any]


class RunFolder:
    """Saves to, finds in and clears `root`. All ranks must call its methods; only the first rank removes."""

    def __init__(self, root: Path, world: World, keep_last: int) -> None:
        self.root, self._world, self._keep_last = root, world, keep_last
        self._pending: tuple[Path, Any] | None = None
        self.last: Path | None = None
        self._lock: int | None = None  # of the folder, on the first rank, until `release`

    def claim(self, about: Description, more: Description, *, anew: bool, threads: int | None) -> int:
        """Make the folder, or check that it can hold this run; with `anew` old checkpoints are set aside.

        `more` is stored too, but may change. Returns the number of CPU threads: what was asked for, what the run
        began with, or the usual number.
        """
        refusal, count = None, 0
        if self._world.is_first:
            try:
                refusal = self._refuse(about, anew=anew)
            except OSError as error:
                refusal = f'"{error.filename}" cannot be read: {error.strerror}. Choose another --output.'
            kept = None if refusal or anew else self._read().get("threads")
            count = threads or (kept if isinstance(kept, int) and 0 < kept <= 4096 else usual_threads())
            if refusal is None:
                self._take(about | more | {"threads": count}, anew=anew)
        refusal, count = self._world.collect((refusal, count))[0]
        if refusal:
            raise InputError(refusal)
        return int(count)

    def release(self) -> None:
        """Another process may claim the folder from here on."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked in the meantime has the descriptor too
            os.close(lock)

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, as the first rank sees them, newest first."""
        found = [step for kind, step in self._entries() if kind == "step" and _is_whole(self.path_of(step))]
        steps: list[int] = self._world.collect(sorted(found, reverse=True))[0]
        return steps

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.root / f"step-{step:08}"

    def load(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        """Load the newest whole checkpoint and return its extra values; None if there is none.

        Hyper-parameters stay as the settings of this run have them.
        """
        steps = self.steps()  # without torn ones, on which ranks would raise different errors
        if not steps:
            return None
        given = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        extra = unbounded.load(self.path_of(steps[0]), model, optimizer)
        for group, values in zip(optimizer.param_groups, given, strict=True):
            group.update(values)
        self.last = self.path_of(steps[0])
        return extra

    def save(self, step: int, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> Path:
        """Begin to save a step while training continues. `settle` waits for it, and then removes older ones."""
        self.settle()
        path = self.path_of(step)
        self._pending = (path, unbounded.save(path, model, optimizer, wait=False, **extra))
        return path

    def find_last(self) -> Path | None:
        """The last whole checkpoint that this rank knows of, for a final message: it does not ask other ranks."""
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
        """Wait for the running save, if there is one, and remove checkpoints that are no longer kept."""
        if self._pending is None:
            return
        (path, handle), self._pending = self._pending, None
        handle.wait()
        self.last = path
        if self._world.is_first:
            steps = sorted((step for kind, step in self._entries() if kind == "step"), reverse=True)
            old = [self.path_of(step) for step in steps[self._keep_last :]]
            for gone in [*old, *(self._set_aside(step) for kind, step in self._entries() if kind == "replaced")]:
                shutil.rmtree(gone, ignore_errors=True)

    # -- on the first rank ------------------------------------------------------------------------------------------

    def _refuse(self, about: Description, *, anew: bool) -> str | None:
        """Makes the folder if it is missing. Returns why it cannot hold this run; None if it can."""
        if self.root.exists() and not self.root.is_dir():
            return f'--output "{self.root}" is not a folder. Choose another.'
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f'--output "{self.root}" cannot be made: {error.strerror}. Choose another.'
        if not os.access(self.root, os.W_OK | os.X_OK):
            return f'--output "{self.root}" is not writable by this user. Choose another.'
        if not is_metrics(self.root / METRICS):
            return f'"{self.root / METRICS}" is not our metrics file, and would be replaced. Choose another --output.'
        if not self._is_ours():
            return f'"{self.root / RUN_FILE}" is not our file, and would be replaced. Choose another --output.'
        other = None if anew else self._other_run(about)
        if other is not None:
            return (
                f'--output "{self.root}" holds another run: {other} Choose another --output, or start over with '
                "--resume never (its checkpoints are removed once this run has one)."
            )
        if not self._take_lock():
            return (
                f'--output "{self.root}" is in use: another process trains into it. Wait until that has ended, or '
                "choose another --output."
            )
        return None

    def _take_lock(self) -> bool:
        """Whether no other process has this folder. On a filesystem without such locks, nobody knows."""
        lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        self._lock = lock
        return True

    def _take(self, about: Description, *, anew: bool) -> None:
        if anew:
            self._set_all_aside()
        write_file(self.root / RUN_FILE, json.dumps({**_OURS, **about}, indent=1) + "\n")

    def _is_ours(self) -> bool:
        """Whether the description of a run may go to its file: there is none, an empty one, or one of ours."""
        path = self.root / RUN_FILE
        if not path.is_file():
            return not os.path.lexists(path)
        return not path.stat().st_size or _OURS.items() <= self._read().items()

    def _read(self) -> Description:
        """How the run in this folder described itself; empty if there is none, or another file in its place."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            there = json.loads((self.root / RUN_FILE).read_text())
            if isinstance(there, dict):
                return there
        return {}

    def _other_run(self, about: Description) -> str | None:
        """How the run in this folder differs from this one; None if it is the same run, or has no checkpoint."""
        if not any(kind == "step" for kind, _ in self._entries()):
            return None
        there = self._read()
        for key, value in about.items():
            if there.get(key, value) != value:
                return f"its {key} is {json.dumps(there[key])}, not {json.dumps(value)}."
        return None

    def _set_all_aside(self) -> None:
        for kind, step in self._entries():
            if kind == "step":
                shutil.rmtree(self._set_aside(step), ignore_errors=True)
                self.path_of(step).rename(self._set_aside(step))

    def _set_aside(self, step: int) -> Path:
        return self.root / f"replaced-{step:08}"

    def _entries(self) -> list[tuple[str, int]]:
        if not self._world.is_first or not self.root.is_dir():
            return []
        return [(match[1], int(match[2])) for path in self.root.iterdir() if (match := _NAME.fullmatch(path.name))]


def usual_threads() -> int:
    """OMP_NUM_THREADS, whatever other code in this process has set; otherwise torch's number."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isascii() and given.isdigit() and 0 < int(given) <= 4096 else torch.get_num_threads()


def _is_whole(path: Path) -> bool:
    try:
        return bool(find(path))
    except FileNotFoundError:
        return False
