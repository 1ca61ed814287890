"""Checks where a run will write, before anything is built; and describes what it trains, for its folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from unbounded.checkpoint.safetensors_writer import refuse_adapters
from unbounded.errors import DiskError, InputError
from unbounded.native.disk.place import check_folder
from unbounded.observe import trace
from unbounded.observe.boards import check_boards
from unbounded.train.options.settings import Settings


def check_outputs(settings: Settings) -> None:
    """Refuse files and folders that cannot or must not be written, and boards that are not installed."""
    if settings.trace is not None:
        trace.check_path(settings.trace)
    check_boards(settings.report_to)
    for folder in settings.disk_path or ():
        _check_disk_path(Path(folder))
    if settings.export is not None:
        _check_export(settings, Path(settings.export))


def _check_disk_path(folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `shard` will give them
            check_folder(folder)
    except DiskError as error:
        raise InputError(str(error)) from None


def _check_export(settings: Settings, target: Path) -> None:
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        reason = "" if there == target else f', because "{there}" is not one'
        raise InputError(f'--export "{target}" is not a folder{reason}. Choose another.')
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f'--export "{target}" cannot be written: "{there}" is not writable by this user.')
    for flag, base in (
        ("--model", settings.model),
        ("--from-config", settings.from_config),
        ("--tokenizer", settings.tokenizer),
        ("--output", settings.output),
    ):
        within = flag == "--output"  # next to the checkpoints is fine
        if base is not None and _covers(target, Path(base), within=within):
            raise InputError(f'--export "{target}" would overwrite what {flag} "{base}" holds. Choose another folder.')
    if settings.lora_rank is None:
        refuse_adapters(target)


def _covers(target: Path, held: Path, *, within: bool) -> bool:
    """Whether `target` is `held` or contains it (or, unless `within`, is inside it). Links are followed."""
    a, b = Path(os.path.realpath(target)), Path(os.path.realpath(held))
    return a == b or a in b.parents or (not within and b in a.parents)


def describe_run(settings: Settings) -> dict[str, Any]:
    """What cannot change when a run is resumed, because its checkpoints would not fit, or would mean another model."""
    given = settings.model or settings.from_config
    model = Path(os.path.realpath(given)).name if given else "the built-in GPT"
    shape = None if given else [settings.layers, settings.width, settings.heads, settings.sequence_length]
    return {
        "model": model,
        "shape": shape,
        "optimizer": settings.optimizer,
        "lora_rank": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_targets": settings.lora_targets and [*settings.lora_targets],
    }
