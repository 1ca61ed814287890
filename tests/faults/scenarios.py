"""What is done while a system call fails, and what must be true afterwards.

Each scenario has three parts, and each runs in its own process. `prepare` makes what is there before. `act` does its
work with the fault, and must be able to go on after an error. `check` looks at what is left, also after a kill. The
last two say what is wrong, if anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unbounded
from tests import process
from tests.checkpoint.marks import mark, marked, read_mark
from tests.faults.shim import Fault, armed, failed_call, seen
from unbounded.errors import CheckpointError, DiskError, StateError
from unbounded.weights.safetensors_reader import WeightFolder

ONE_FILE, MANY_FILES = 10**9, 20_000


@dataclass(frozen=True)
class Outcome:
    """The result of an act: how many calls it made, the one that failed, what was raised, and what is wrong."""

    calls: int
    failed: str
    error: str
    problem: str


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], None]
    act: Callable[[Path, Fault | None], Outcome]
    check: Callable[[Path], str]


def _caught(
    root: Path, fault: Fault | None, work: Callable[[], Any]
) -> tuple[Exception | None, Callable[..., Outcome]]:
    """Runs `work` with the fault; returns its error, and a function that makes an outcome."""
    error: Exception | None = None
    with armed(root, fault):
        try:
            work()
        except Exception as caught:
            error = caught
        calls, failed = seen(), failed_call()

    def outcome(problem: str) -> Outcome:
        told = "" if error is None else f"{type(error).__name__}: {error}"
        return Outcome(calls, failed, told, problem or _wrong_error(error, fault) or _open_files(root))

    return error, outcome


def _wrong_error(error: Exception | None, fault: Fault | None) -> str:
    """A system error must be raised as one of ours, with its errno and a path."""
    if error is None:
        return ""
    if isinstance(error, DiskError):
        right = fault is not None and error.errno == fault.code and error.filename and str(error.errno) in str(error)
        return "" if right else f"errno {error.errno} and path {error.filename} are not told: {error}"
    return "" if isinstance(error, CheckpointError) else f"{type(error).__name__} is no error of ours: {error}"


def _open_files(root: Path) -> str:
    left = [path for path in process.open_files() if path.startswith((f"{root}/c", f"{root}/e"))]
    return f"still open: {left}" if left else ""


# -- saving ------------------------------------------------------------------------------------------------------------


def _prepare_save(root: Path) -> None:
    unbounded.save(root / "c", *marked(1), number=1)


def _act_save(root: Path, fault: Fault | None, *, wait: bool) -> Outcome:
    model, optimizer = marked(2)
    error, outcome = _caught(
        root, fault, lambda: unbounded.save(root / "c", model, optimizer, wait=wait, number=2).wait()
    )
    found = read_mark(root / "c")
    if found != 2 and (error is None or found != 1):
        return outcome(f"the checkpoint holds {found}")
    mark(model, 3)
    unbounded.save(root / "c", model, optimizer, number=3)
    left = sorted(os.listdir(root))
    return outcome("" if read_mark(root / "c") == 3 and left == ["c"] else f"the next save leaves {left}")


def _check_save(root: Path) -> str:
    """After a kill: the old or the new one, whole; it loads, and a save cleans up."""
    found = read_mark(root / "c")
    model, optimizer = marked(5)
    loaded = unbounded.load(root / "c", model, optimizer)["number"]
    unbounded.save(root / "c", model, optimizer, number=loaded)
    left = sorted(os.listdir(root))
    right = found in (1, 2, 3) and loaded == found == read_mark(root / "c") and left == ["c"]
    return "" if right else f"found {found}, loaded {loaded}, left {left}"


# -- loading -----------------------------------------------------------------------------------------------------------


def _act_load(root: Path, fault: Fault | None, *, tier: str) -> Outcome:
    (root / "swap").mkdir(exist_ok=True)
    plan = {"weights": tier, "disk_path": str(root / "swap")} if tier == "disk" else {"weights": tier}
    model, optimizer = marked(5, plan)
    error, outcome = _caught(root, fault, lambda: unbounded.load(root / "c", model, optimizer))
    try:
        values = _values_of(model, optimizer)
        if values != ({1.0} if error is None else {5.0}):
            return outcome(f"the model holds {sorted(values)}")
    except StateError:
        if error is None:
            return outcome("a model that was loaded refuses to be read")
    unbounded.load(root / "c", model, optimizer)
    return outcome("" if _values_of(model, optimizer) == {1.0} else "a second load does not help")


def _values_of(model: torch.nn.Module, optimizer: Any) -> set[float]:
    optimizer.wait()
    with unbounded.full_params(model):
        return {float(v) for parameter in model.parameters() for v in parameter.unique()}


def _check_load(root: Path) -> str:
    return "" if read_mark(root / "c") == 1 else "the checkpoint has changed"


# -- exporting ---------------------------------------------------------------------------------------------------------


def _export(root: Path, number: int, max_bytes: int) -> Any:
    model, _ = marked(number)
    unbounded.export(root / "e", model, max_shard_bytes=max_bytes)
    return model


def _act_export(root: Path, fault: Fault | None, *, max_bytes: int) -> Outcome:
    model, _ = marked(2)
    error, outcome = _caught(root, fault, lambda: unbounded.export(root / "e", model, max_shard_bytes=max_bytes))
    found = _read_export(root)
    if found not in ({2.0}, {1.0} if error is not None else {2.0}):
        return outcome(f"the folder holds {sorted(found)}")
    return outcome(_check_export(root))


def _check_export(root: Path) -> str:
    """The old or the new one, whole; and another export cleans up."""
    found = _read_export(root)
    if found not in ({1.0}, {2.0}):
        return f"the folder holds {sorted(found)}"
    _export(root, 4, ONE_FILE)
    left = sorted(os.listdir(root / "e"))
    return "" if _read_export(root) == {4.0} and left == ["model.safetensors"] else f"the next export leaves {left}"


def _read_export(root: Path) -> set[float]:
    weights = WeightFolder(root / "e")
    tensors = [weights.read(key) for key in weights.places]
    assert len(tensors) == 6
    return {float(v) for tensor in tensors for v in tensor.unique()}


def _saves(*, wait: bool) -> Scenario:
    return Scenario(_prepare_save, lambda root, fault: _act_save(root, fault, wait=wait), _check_save)


def _loads(tier: str) -> Scenario:
    return Scenario(_prepare_save, lambda root, fault: _act_load(root, fault, tier=tier), _check_load)


def _exports(before: int, after: int) -> Scenario:
    def prepare(root: Path) -> None:
        _export(root, 1, before)

    return Scenario(prepare, lambda root, fault: _act_export(root, fault, max_bytes=after), _check_export)


SCENARIOS = {
    "save": _saves(wait=True),
    "save in the background": _saves(wait=False),
    "load": _loads("host"),
    "load into the disk tier": _loads("disk"),
    "export, one file over one": _exports(ONE_FILE, ONE_FILE),
    "export, several files over one": _exports(ONE_FILE, MANY_FILES),
    "export, several files over several": _exports(MANY_FILES, MANY_FILES),
    "export, one file over several": _exports(MANY_FILES, ONE_FILE),
}
